// Multiplies repacked matrices by 1 to 8 rows, and compares with products of the values that the matrices stand for.
// Ends with 1 and a line where they differ by more than rounding.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "ggml.h"

extern "C" void iqk_repack_tensor(struct ggml_tensor * tensor);

constexpr int n_values = 1280, n_weights = 208, most_rows = 8;

static std::vector<float> multiply(ggml_type type, const std::vector<char> & matrix, const float * rows, int n_rows) {
    std::vector<char> memory(64u << 20);
    ggml_context * context = ggml_init({memory.size(), memory.data(), false});
    ggml_tensor * a = ggml_new_tensor_2d(context, type, n_values, n_weights);
    std::memcpy(a->data, matrix.data(), matrix.size());
    iqk_repack_tensor(a);
    ggml_tensor * b = ggml_new_tensor_2d(context, GGML_TYPE_F32, n_values, n_rows);
    std::memcpy(b->data, rows, sizeof(float)*n_values*n_rows);
    ggml_tensor * product = ggml_mul_mat(context, a, b);
    ggml_cgraph * graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, product);
    ggml_graph_compute_with_ctx(context, graph, 2);
    auto values = (const float *)product->data;
    std::vector<float> result(values, values + size_t(n_weights)*n_rows);
    ggml_free(context);
    return result;
}

static bool check(ggml_type type) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> weights(n_values*n_weights), known(weights.size()), rows(n_values*most_rows);
    for (auto & value : weights) value = normal(random);
    for (auto & value : rows) value = normal(random);
    std::vector<char> matrix(ggml_row_size(type, n_values)*n_weights);
    ggml_quantize_chunk(type, weights.data(), matrix.data(), 0, n_weights, n_values, nullptr);
    ggml_internal_get_type_traits(type).to_float(matrix.data(), known.data(), known.size());
    std::vector<double> exact(n_weights*most_rows);
    for (int row = 0; row < most_rows; ++row) {
        for (int i = 0; i < n_weights; ++i) {
            for (int j = 0; j < n_values; ++j) exact[row*n_weights + i] += double(known[i*n_values + j])*rows[row*n_values + j];
        }
    }
    for (int n_rows = 1; n_rows <= most_rows; ++n_rows) {
        const auto products = multiply(type, matrix, rows.data(), n_rows);
        double off = 0, size = 0;
        for (size_t i = 0; i < products.size(); ++i) {
            off += std::pow(products[i] - exact[i], 2);
            size += exact[i]*exact[i];
        }
        const double error = std::sqrt(off/size);
        if (!(error < 0.02)) { // rows in 8 bits make some 0.007
            std::printf("products of %s with %d rows are off by %.3f of their size\n", ggml_type_name(type), n_rows, error);
            return false;
        }
    }
    return true;
}

int main() {
    ggml_free(ggml_init({1u << 20, nullptr, false})); // tables of the library are made with the first
    for (auto type : {GGML_TYPE_Q4_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K}) {
        if (!check(type)) return 1;
    }
    return 0;
}
