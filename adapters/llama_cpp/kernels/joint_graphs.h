// Several graphs of one model computed together: a product with a matrix of the model is made once for the rows of all,
// everything else for each graph by one thread. A context has its own graph and its own KV cache, so positions lie as
// they do alone, and the weights cross the memory once for all sequences (docs/adr/0158-sequences-in-one-pass.md).
//
// ggml_joint_begin(); llama_decode(...) of each context, which computes nothing; ggml_joint_compute(threads);
// ggml_joint_output(place, rows) for the logits. Included by ggml.c.

enum { JOINT_MOST_GRAPHS = 64 };

struct joint_graph {
    const struct ggml_cgraph * graph;
    int * stops;           // the places of its products with matrices of the model
    const float * output;  // of the last node
};

static _Thread_local struct {
    bool deferring;
    int n_graphs, n_stops, n_threads;
    struct joint_graph graphs[JOINT_MOST_GRAPHS];
    int * stops;
    bool * alone;     // whether what is before a stop may be computed by one thread for each graph
    char * shared;    // of all threads: quantised rows, and what nodes need
    char * own;       // of each thread
    float * product;  // of all graphs
    size_t n_shared, n_own, n_all_own, n_product, n_all_stops, n_all_alone;
} joint;

GGML_API GGML_CALL void ggml_joint_begin(void) {
    joint.deferring = true;
    joint.n_graphs = 0;
}

GGML_API GGML_CALL void ggml_joint_end(void) {
    joint.deferring = false;
}

// Whether a graph is computed later, by ggml_joint_compute.
GGML_API GGML_CALL bool ggml_joint_defer(struct ggml_cgraph * graph) {
    if (!joint.deferring || joint.n_graphs == JOINT_MOST_GRAPHS) {
        return false;
    }
    joint.graphs[joint.n_graphs++] = (struct joint_graph) { graph, NULL, NULL };
    return true;
}

// The logits of a graph, `rows` of them, until the next call of ggml_joint_begin.
GGML_API GGML_CALL const float * ggml_joint_output(int place, int * rows) {
    const struct joint_graph * it = joint.graphs + place;
    *rows = (int) it->graph->nodes[it->graph->n_nodes - 1]->ne[1];
    return it->output;
}

// What a product's rows are, and what it multiplies them by.
static const struct ggml_tensor * joint_rows(const struct ggml_tensor * node) {
    return node->src[node->op == GGML_OP_MUL_MAT ? 1 : 2];
}

// Whether two products have the same rows, quantised alike.
static bool joint_are_alike(const struct ggml_tensor * one, const struct ggml_tensor * other) {
    return joint_rows(one) == joint_rows(other) &&
           type_traits[one->src[0]->type].vec_dot_type == type_traits[other->src[0]->type].vec_dot_type;
}

static bool joint_is_matrix(const struct ggml_tensor * tensor) {
    return tensor->op == GGML_OP_NONE && !tensor->view_src && ggml_is_quantized(tensor->type) &&
           tensor->ne[2] == 1 && tensor->ne[3] == 1;
}

static bool joint_is_product(const struct ggml_tensor * node) {
    if (node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_FUSED_UP_GATE) {
        return false;
    }
    if (!joint_is_matrix(node->src[0]) || (node->op == GGML_OP_FUSED_UP_GATE && !joint_is_matrix(node->src[1]))) {
        return false;
    }
    const struct ggml_tensor * rows = joint_rows(node);
    return rows->type == GGML_TYPE_F32 && rows->nb[0] == sizeof(float) && rows->ne[2] == 1 && rows->ne[3] == 1 &&
           node->type == GGML_TYPE_F32 && node->nb[1] == node->ne[0]*sizeof(float);
}

// Whether a thread may compute a node alone: each of its values is the same sum then.
static bool joint_is_alone(const struct ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_NONE: case GGML_OP_VIEW: case GGML_OP_RESHAPE: case GGML_OP_PERMUTE: case GGML_OP_TRANSPOSE:
        case GGML_OP_ADD: case GGML_OP_MULTI_ADD: case GGML_OP_SUB: case GGML_OP_MUL: case GGML_OP_DIV:
        case GGML_OP_SCALE: case GGML_OP_SOFTCAP: case GGML_OP_UNARY: case GGML_OP_GLU: case GGML_OP_FUSED_MUL_UNARY:
        case GGML_OP_NORM: case GGML_OP_FUSED_NORM: case GGML_OP_RMS_NORM: case GGML_OP_FUSED_RMS_NORM:
        case GGML_OP_FUSED_RMS_RMS_ADD: case GGML_OP_ROPE: case GGML_OP_ROPE_CACHE: case GGML_OP_ROPE_FAST:
        case GGML_OP_CPY: case GGML_OP_CONT: case GGML_OP_DUP: case GGML_OP_CONCAT:
        case GGML_OP_GET_ROWS: case GGML_OP_SET_ROWS: case GGML_OP_FLASH_ATTN_EXT:
            return true;
        default:
            return false;
    }
}

static bool joint_grow(void ** room, size_t * has, size_t wants) {
    if (*has < wants) {
        free(*room);
        *room = malloc(wants);
        *has = *room ? wants : 0;
    }
    return *room || !wants;
}

// Find the stops of all graphs. False where their products are not the same.
static bool joint_plan(int n_threads) {
    size_t n_places = 0;
    for (int g = 0; g < joint.n_graphs; ++g) {
        n_places += joint.graphs[g].graph->n_nodes;
    }
    if (!joint_grow((void **) &joint.stops, &joint.n_all_stops, n_places*sizeof(int)) ||
        !joint_grow((void **) &joint.alone, &joint.n_all_alone, n_places*sizeof(bool) + 1)) {
        return false;
    }
    int * place = joint.stops;
    size_t n_shared = 0, n_own = 0, n_product = 0;
    const struct joint_graph * first = joint.graphs;
    for (int g = 0; g < joint.n_graphs; ++g) {
        struct joint_graph * it = joint.graphs + g;
        struct ggml_cgraph * graph = (struct ggml_cgraph *) it->graph;
        n_shared = MAX(n_shared, ggml_graph_plan(graph, n_threads).work_size);
        n_own = MAX(n_own, ggml_graph_plan(graph, 1).work_size);
        it->stops = place;
        bool alone = true;
        int n_stops = 0;
        for (int i = 0; i < graph->n_nodes; ++i) {
            const struct ggml_tensor * node = graph->nodes[i];
            const bool stop = joint_is_product(node);
            alone = alone && (stop || joint_is_alone(node));
            if (!stop && i < graph->n_nodes - 1) {
                continue;
            }
            joint.alone[n_stops] = alone && (g == 0 || joint.alone[n_stops]);
            if (stop) {
                if (g > 0) {
                    const struct ggml_tensor * same = n_stops < joint.n_stops ? first->graph->nodes[first->stops[n_stops]] : NULL;
                    if (!same || same->op != node->op || same->src[0]->data != node->src[0]->data) {
                        return false;
                    }
                }
                alone = true;
                *place++ = i;
                ++n_stops;
                if (i == graph->n_nodes - 1) {
                    joint.alone[n_stops] = true;  // nothing is behind it
                }
            }
        }
        if (g == 0) {
            joint.n_stops = n_stops;
        } else if (n_stops != joint.n_stops) {
            return false;
        }
    }
    for (int s = 0; s < joint.n_stops; ++s) {
        const struct ggml_tensor * node = first->graph->nodes[first->stops[s]];
        size_t rows = 0;
        for (int g = 0; g < joint.n_graphs; ++g) {
            rows += joint_rows(joint.graphs[g].graph->nodes[joint.graphs[g].stops[s]])->ne[1];
        }
        n_product = MAX(n_product, rows*node->ne[0]);
        n_shared = MAX(n_shared, rows*ggml_row_size(type_traits[node->src[0]->type].vec_dot_type, node->src[0]->ne[0]));
    }
    joint.n_own = GGML_PAD(n_own, CACHE_LINE_SIZE) + CACHE_LINE_SIZE;
    return joint_grow((void **) &joint.shared, &joint.n_shared, n_shared + CACHE_LINE_SIZE) &&
           joint_grow((void **) &joint.own, &joint.n_all_own, joint.n_own*n_threads) &&
           joint_grow((void **) &joint.product, &joint.n_product, n_product*sizeof(float));
}

static void joint_compute_nodes(
        struct ggml_compute_params * params, const struct ggml_cgraph * graph, int first, int end, bool all_threads) {
    for (int i = first; i < end; ++i) {
        if (ggml_is_noop(graph->nodes[i])) {
            continue;
        }
        i = ggml_compute_forward(params, graph->nodes[i], graph->nodes[i]->op == GGML_OP_MUL_MAT ? NULL : graph, i);
        if (all_threads) {
            ggml_barrier(params->shared);
        }
    }
}

// Multiply the rows of all graphs at a stop. `known`: they are quantised. Returns whether they still are.
static bool joint_multiply(struct ggml_compute_params * params, struct joint_graph * graphs, int n_graphs,
        float * product, int stop, bool known) {
    const struct ggml_tensor * one = graphs[0].graph->nodes[graphs[0].stops[stop]];
    const struct ggml_tensor * matrix = one->src[0];
    const enum ggml_type type = type_traits[matrix->type].vec_dot_type;
    const size_t row_size = ggml_row_size(type, matrix->ne[0]);
    const ggml_from_float_t from_float = type_traits[type].from_float;
    const int ith = params->ith, nth = params->nth;
    char * quantized = params->wdata;
    int n_rows = 0;
    for (int g = 0; g < n_graphs; ++g) {
        const struct ggml_tensor * rows = joint_rows(graphs[g].graph->nodes[graphs[g].stops[stop]]);
        for (int r = 0; r < rows->ne[1] && !known; ++r) {
            if ((n_rows + r) % nth == ith) {
                from_float((const float *) ((const char *) rows->data + r*rows->nb[1]), quantized + (n_rows + r)*row_size,
                           rows->ne[0]);
            }
        }
        n_rows += rows->ne[1];
    }
    if (!known) {
        ggml_barrier(params->shared);
    }
    if (!n_rows) {
        return true;
    }
    bool done;
    if (one->op == GGML_OP_MUL_MAT) {
        done = iqk_mul_mat_4d(matrix->ne[1], n_rows, matrix->ne[0], 1, 1, 1, 1, matrix->nb[2], matrix->nb[3],
                row_size*n_rows, row_size*n_rows, one->ne[0]*n_rows, one->ne[0]*n_rows,
                matrix->type, matrix->data, matrix->nb[1], type, quantized, row_size, product, one->ne[0], ith, nth);
    } else {
        done = iqk_moe_fused_up_gate(matrix->ne[1], n_rows, matrix->ne[0], n_rows, one->op_params[0],
                matrix->type, matrix->data, one->src[1]->data, matrix->nb[1], type, quantized, row_size, NULL, NULL,
                product, one->nb[1], one->nb[1]*n_rows, NULL, *(const float *) (one->op_params + 1), ith, nth);
    }
    ggml_barrier(params->shared);
    int row = 0;
    for (int g = 0; g < n_graphs; ++g) {
        const int place = graphs[g].stops[stop];
        struct ggml_tensor * node = graphs[g].graph->nodes[place];
        if (!done) {
            ggml_compute_forward(params, node, NULL, place);
            ggml_barrier(params->shared);
        } else if (place == graphs[g].graph->n_nodes - 1) {
            if (ith == 0) {
                graphs[g].output = product + row*node->ne[0];
            }
        } else if (g % nth == ith) {
            memcpy(node->data, product + row*node->ne[0], node->ne[0]*node->ne[1]*sizeof(float));
        }
        row += node->ne[1];
    }
    return done;
}

// Compute all graphs that were deferred. Returns how many passes that took: 1, or one for each graph where they cannot be
// computed together.
GGML_API GGML_CALL int ggml_joint_compute(int n_threads) {
    joint.deferring = false;
    const int n_graphs = joint.n_graphs;
    for (int g = 0; g < n_graphs; ++g) {
        const struct ggml_cgraph * graph = joint.graphs[g].graph;
        joint.graphs[g].output = graph->nodes[graph->n_nodes - 1]->data;
    }
#ifdef GGML_USE_OPENMP
    if (n_graphs > 1 && joint_plan(n_threads)) {
        struct ggml_cplan cplan = { .work_size = joint.n_shared, .work_data = (uint8_t *) joint.shared, .n_threads = n_threads };
        struct ggml_compute_state_shared all = { .cplan = &cplan, .n_threads = n_threads, .n_batch = 1 };
        struct ggml_compute_state_shared one = { .cplan = &cplan, .n_threads = 1, .n_batch = 1 };
        // What is of the calling thread alone is given to the others here.
        struct joint_graph * graphs = joint.graphs;
        const bool * alone = joint.alone;
        char * shared = joint.shared, * own = joint.own;
        const size_t n_shared = joint.n_shared, n_own = joint.n_own;
        float * product = joint.product;
        const int n_stops = joint.n_stops;
        #pragma omp parallel num_threads(n_threads)
        {
            #pragma omp single
            all.n_threads = omp_get_num_threads();

            const int ith = omp_get_thread_num(), nth = all.n_threads;
            struct ggml_compute_params together = { ith, nth, n_shared, shared, &all };
            struct ggml_compute_params by_itself = { 0, 1, n_own, own + ith*n_own, &one };
            bool quantized = false;
            for (int stop = 0; stop <= n_stops; ++stop) {
                bool known = quantized && stop < n_stops;
                for (int g = 0; g < n_graphs; ++g) {
                    const int first = stop ? graphs[g].stops[stop - 1] + 1 : 0;
                    const int end = stop < n_stops ? graphs[g].stops[stop] : graphs[g].graph->n_nodes;
                    if (!alone[stop]) {
                        if (g == 0) {
                            ggml_barrier(&all);
                        }
                        joint_compute_nodes(&together, graphs[g].graph, first, end, true);
                    } else if (g % nth == ith) {
                        joint_compute_nodes(&by_itself, graphs[g].graph, first, end, false);
                    }
                    known = known && alone[stop] &&
                            joint_are_alike(graphs[g].graph->nodes[first - 1], graphs[g].graph->nodes[end]);
                }
                ggml_barrier(&all);
                if (stop < n_stops) {
                    quantized = joint_multiply(&together, graphs, n_graphs, product, stop, known);
                }
            }
        }
        return 1;
    }
#endif
    for (int g = 0; g < n_graphs; ++g) {
        struct ggml_cgraph * graph = (struct ggml_cgraph *) joint.graphs[g].graph;
        struct ggml_cplan cplan = ggml_graph_plan(graph, n_threads);
        if (!joint_grow((void **) &joint.shared, &joint.n_shared, cplan.work_size)) {
            return -1;
        }
        cplan.work_data = (uint8_t *) joint.shared;
        if (ggml_graph_compute(graph, &cplan) != GGML_STATUS_SUCCESS) {
            return -1;
        }
    }
    return n_graphs;
}
