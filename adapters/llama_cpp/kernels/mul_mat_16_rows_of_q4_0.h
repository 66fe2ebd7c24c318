// Products of Q4_0 that repack_16_rows.h arranged: see mul_mat_16_rows.h. Included by iqk_gemm_legacy_quants.cpp.
#ifdef HAVE_FANCY_SIMD

#include "sixteen_rows.h"

template <int nrc_y>
static void mul_mat_q4_0_16_rows(int n, const void * vx, size_t bx, const DataInfo& info, int nrc_x) {
    GGML_ASSERT(nrc_x%16 == 0);
    Q8<nrc_y, block_q8_2_x4> q8(info);
    const auto m4 = _mm512_set1_epi8(0xf);
    const int nb = n / QK4_NL;
    __m512  acc[nrc_y];
    __m512i qx[8];
    for (int ix = 0; ix < nrc_x; ix += 16) {
        const SixteenRows<block_iq4_nl_r8, 2> rows(vx, bx, ix);
        auto unpack = [&rows, &qx, &m4] (int ib) {
            const auto& low = rows.block(0, ib), & high = rows.block(1, ib);
            for (int j = 0; j < 4; ++j) {
                auto bits = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)low.qs+j)),
                        _mm256_loadu_si256((const __m256i *)high.qs+j), 1);
                qx[j+0] = _mm512_and_si512(bits, m4);
                qx[j+4] = _mm512_and_si512(_mm512_srli_epi16(bits, 4), m4);
            }
            return _mm512_cvtph_ps(MM256_SET_M128I(_mm_loadu_si128((const __m128i *)high.d), _mm_loadu_si128((const __m128i *)low.d)));
        };
        // Bits stand for 0 to 15, which is 8 too many; s: the sum of y.
        auto add = [&qx] (__m512 scales, uint16_t d, uint16_t s, const int8_t * y, __m512 acc) {
            auto sum = dot_16_rows<8>(qx, y, _mm512_set1_epi32(-8*int16_t(s)));
            auto dy = _mm512_set1_ps(GGML_BF16_TO_FP32(ggml_bf16_t{d}));
            return _mm512_fmadd_ps(_mm512_mul_ps(scales, dy), _mm512_cvtepi32_ps(sum), acc);
        };
        for (int iy = 0; iy < nrc_y; ++iy) acc[iy] = _mm512_setzero_ps();
        int ib = 0;
        for (; ib + 4 <= nb; ib += 4) {
            for (int k = 0; k < 4; ++k) {
                rows.prefetch(ib + k);
                auto scales = unpack(ib + k);
                for (int iy = 0; iy < nrc_y; ++iy) {
                    const auto& y = q8.y[iy][ib/4];
                    acc[iy] = add(scales, y.d[k], y.d[k+4], y.qs + 32*k, acc[iy]);
                }
            }
        }
        for (; ib < nb; ++ib) {
            auto scales = unpack(ib);
            for (int iy = 0; iy < nrc_y; ++iy) {
                const auto& y = ((const block_q8_2 *)q8.y[iy])[ib];
                acc[iy] = add(scales, y.d, y.s, y.qs, acc[iy]);
            }
        }
        for (int iy = 0; iy < nrc_y; ++iy) info.store(ix, iy, acc[iy]);
    }
}

#else
#define mul_mat_q4_0_16_rows mul_mat_q4_0_r8_q8_2
#endif
