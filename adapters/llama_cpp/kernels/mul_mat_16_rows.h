// Products of K-quants that repack_16_rows.h arranged: 512 bits are four values of each of sixteen rows of weights, so that
// four values of a row of activations are read for all of them at once. Each row of activations has the same sums,
// however many there are. Included by iqk_gemm_kquants.cpp, whose types it uses.
#ifdef HAVE_FANCY_SIMD

#include "sixteen_rows.h"

// Of four times 64 bytes, x[k] those of a group, y[j] gets the j-th 16 bytes of all.
inline void transpose_lanes(const __m512i * x, __m512i * y) {
    auto t0 = _mm512_shuffle_i64x2(x[0], x[1], 0x44), t1 = _mm512_shuffle_i64x2(x[0], x[1], 0xee);
    auto t2 = _mm512_shuffle_i64x2(x[2], x[3], 0x44), t3 = _mm512_shuffle_i64x2(x[2], x[3], 0xee);
    y[0] = _mm512_shuffle_i64x2(t0, t2, 0x88);
    y[1] = _mm512_shuffle_i64x2(t0, t2, 0xdd);
    y[2] = _mm512_shuffle_i64x2(t1, t3, 0x88);
    y[3] = _mm512_shuffle_i64x2(t1, t3, 0xdd);
}

// Of four times 32 bytes, x[k] four for each of the eight blocks of a group, y gets sixteen for each block.
inline void transpose_scales(const __m256i * x, __m128i * y) {
    auto t0 = _mm256_unpacklo_epi32(x[0], x[1]), t1 = _mm256_unpackhi_epi32(x[0], x[1]);
    auto t2 = _mm256_unpacklo_epi32(x[2], x[3]), t3 = _mm256_unpackhi_epi32(x[2], x[3]);
    const __m256i u[4] = {_mm256_unpacklo_epi64(t0, t2), _mm256_unpackhi_epi64(t0, t2),
                          _mm256_unpacklo_epi64(t1, t3), _mm256_unpackhi_epi64(t1, t3)};
    for (int k = 0; k < 4; ++k) {
        y[k+0] = _mm256_castsi256_si128(u[k]);
        y[k+4] = _mm256_extracti128_si256(u[k], 1);
    }
}

// Q4_K, and Q5_K, which has a fifth bit besides.
template <typename Block, int nrc_y>
static void mul_mat_q45_k_16_rows(int n, const void * vx, size_t bx, const DataInfo& info, int nrc_x) {
    GGML_ASSERT(nrc_x%16 == 0);
    constexpr bool has_fifth = std::is_same_v<Block, block_q5_k_r4>;
    Q8<nrc_y, block_q8_K> q8(info);
    const auto m4 = _mm512_set1_epi8(0xf), m10 = _mm512_set1_epi8(0x10);
    const auto mf = _mm256_set1_epi8(0xf), m30 = _mm256_set1_epi8(0x30);
    const int nbl = n / QK_K;
    __m512  acc[nrc_y];
    __m512i isum[nrc_y], qx[8], lanes[4];
    __m128i scales[8], mins[8];
    for (int ix = 0; ix < nrc_x; ix += 16) {
        const SixteenRows<Block, 4> rows(vx, bx, ix);
        for (int iy = 0; iy < nrc_y; ++iy) acc[iy] = _mm512_setzero_ps();
        for (int ibl = 0; ibl < nbl; ++ibl) { // Block of 256
            __m128i d[4];
            __m256i s[4], m[4];
            for (int k = 0; k < 4; ++k) {
                const auto& block = rows.block(k, ibl);
                d[k] = _mm_loadu_si128((const __m128i *)block.d);
                auto lbits = _mm256_loadu_si256((const __m256i *)block.scales_l);
                auto hbits128 = _mm_loadu_si128((const __m128i *)block.scales_h);
                auto hbits = MM256_SET_M128I(hbits128, _mm_slli_epi16(hbits128, 4));
                s[k] = _mm256_or_si256(_mm256_and_si256(lbits, mf), _mm256_and_si256(hbits, m30));
                m[k] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(lbits, 4), mf), _mm256_and_si256(_mm256_srli_epi16(hbits, 2), m30));
            }
            transpose_scales(s, scales);
            transpose_scales(m, mins);
            auto dx = _mm512_cvtph_ps(MM256_SET_M128I(_mm_unpacklo_epi64(d[2], d[3]), _mm_unpacklo_epi64(d[0], d[1])));
            auto mx = _mm512_cvtph_ps(MM256_SET_M128I(_mm_unpackhi_epi64(d[2], d[3]), _mm_unpackhi_epi64(d[0], d[1])));
            for (int ib = 0; ib < QK_K/32; ++ib) {
                auto c = _mm512_mul_ps(mx, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(mins[ib])));
                for (int iy = 0; iy < nrc_y; ++iy) {
                    acc[iy] = _mm512_fnmadd_ps(c, _mm512_set1_ps(((const float *)q8.y[iy][ibl].bsums)[ib]), acc[iy]);
                }
            }
            for (int iy = 0; iy < nrc_y; ++iy) isum[iy] = _mm512_setzero_si512();
            for (int ib = 0; ib < QK_K/32; ++ib) {
                rows.template prefetch<QK_K/32>(ibl, ib);
                for (int k = 0; k < 4; ++k) qx[k] = _mm512_loadu_si512(rows.block(k, ibl).qs + 64*ib);
                transpose_lanes(qx, lanes);
                for (int j = 0; j < 2; ++j) { // values 0 to 15, 16 to 31
                    qx[4*j+0] = _mm512_and_si512(lanes[j+0], m4);
                    qx[4*j+1] = _mm512_and_si512(lanes[j+2], m4);
                    qx[4*j+2] = _mm512_and_si512(_mm512_srli_epi16(lanes[j+0], 4), m4);
                    qx[4*j+3] = _mm512_and_si512(_mm512_srli_epi16(lanes[j+2], 4), m4);
                }
                if constexpr (has_fifth) {
                    auto h01 = MM256_SET_M128I(_mm_loadu_si128((const __m128i *)rows.block(1, ibl).qh + ib), _mm_loadu_si128((const __m128i *)rows.block(0, ibl).qh + ib));
                    auto h23 = MM256_SET_M128I(_mm_loadu_si128((const __m128i *)rows.block(3, ibl).qh + ib), _mm_loadu_si128((const __m128i *)rows.block(2, ibl).qh + ib));
                    auto hi = _mm512_inserti64x4(_mm512_castsi256_si512(h01), h23, 1);
                    const __m512i h[2] = {_mm512_slli_epi16(hi, 4), hi};
                    for (int j = 0; j < 2; ++j) {
                        qx[4*j+0] = _mm512_or_si512(qx[4*j+0], _mm512_and_si512(h[j], m10));
                        qx[4*j+1] = _mm512_or_si512(qx[4*j+1], _mm512_and_si512(_mm512_srli_epi16(h[j], 2), m10));
                        qx[4*j+2] = _mm512_or_si512(qx[4*j+2], _mm512_and_si512(_mm512_srli_epi16(h[j], 1), m10));
                        qx[4*j+3] = _mm512_or_si512(qx[4*j+3], _mm512_and_si512(_mm512_srli_epi16(h[j], 3), m10));
                    }
                }
                auto scale = _mm512_cvtepu8_epi32(scales[ib]);
                for (int iy = 0; iy < nrc_y; ++iy) {
                    auto y = q8.y[iy][ibl].qs + 32*ib;
                    auto sum = dot_16_rows<8>(qx, y, _mm512_setzero_si512());
                    isum[iy] = _mm512_add_epi32(isum[iy], _mm512_mullo_epi32(scale, sum));
                }
            }
            for (int iy = 0; iy < nrc_y; ++iy) {
                acc[iy] = _mm512_fmadd_ps(_mm512_mul_ps(dx, _mm512_set1_ps(q8.scale(iy, ibl))), _mm512_cvtepi32_ps(isum[iy]), acc[iy]);
            }
        }
        for (int iy = 0; iy < nrc_y; ++iy) info.store(ix, iy, acc[iy]);
    }
}
template <int nrc_y>
static void mul_mat_q4_k_16_rows(int n, const void * vx, size_t bx, const DataInfo& info, int nrc_x) {
    mul_mat_q45_k_16_rows<block_q4_k_r4, nrc_y>(n, vx, bx, info, nrc_x);
}
template <int nrc_y>
static void mul_mat_q5_k_16_rows(int n, const void * vx, size_t bx, const DataInfo& info, int nrc_x) {
    mul_mat_q45_k_16_rows<block_q5_k_r4, nrc_y>(n, vx, bx, info, nrc_x);
}

template <int nrc_y>
static void mul_mat_q6_k_16_rows(int n, const void * vx, size_t bx, const DataInfo& info, int nrc_x) {
    GGML_ASSERT(nrc_x%16 == 0);
    Q8<nrc_y, block_q8_K> q8(info);
    const auto m4 = _mm512_set1_epi8(0xf), m30 = _mm512_set1_epi8(0x30);
    const int nbl = n / QK_K;
    __m512  acc[nrc_y];
    __m512i isum[nrc_y], qx[4], lanes[4];
    alignas(64) int8_t scales[4][4][16]; // of block 4*l + k those of 16 rows at [k][l]
    for (int ix = 0; ix < nrc_x; ix += 16) {
        const SixteenRows<block_q6_k_r4, 4> rows(vx, bx, ix);
        for (int iy = 0; iy < nrc_y; ++iy) acc[iy] = _mm512_setzero_ps();
        for (int ibl = 0; ibl < nbl; ++ibl) { // Block of 256
            __m128i d[4];
            for (int k = 0; k < 4; ++k) {
                d[k] = _mm_loadl_epi64((const __m128i *)rows.block(k, ibl).d);
                qx[k] = _mm512_loadu_si512(rows.block(k, ibl).scales);
            }
            auto dx = _mm512_cvtph_ps(MM256_SET_M128I(_mm_unpacklo_epi64(d[2], d[3]), _mm_unpacklo_epi64(d[0], d[1])));
            auto t0 = _mm512_unpacklo_epi32(qx[0], qx[1]), t1 = _mm512_unpackhi_epi32(qx[0], qx[1]);
            auto t2 = _mm512_unpacklo_epi32(qx[2], qx[3]), t3 = _mm512_unpackhi_epi32(qx[2], qx[3]);
            _mm512_store_si512(scales[0], _mm512_unpacklo_epi64(t0, t2));
            _mm512_store_si512(scales[1], _mm512_unpackhi_epi64(t0, t2));
            _mm512_store_si512(scales[2], _mm512_unpacklo_epi64(t1, t3));
            _mm512_store_si512(scales[3], _mm512_unpackhi_epi64(t1, t3));
            auto scale_of = [&scales] (int b) { return _mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)scales[b%4][b/4])); };
            for (int iy = 0; iy < nrc_y; ++iy) isum[iy] = _mm512_setzero_si512();
            for (int ib = 0; ib < QK_K/32; ++ib) { // bits stand for 0 to 63, which is 32 too many
                auto pair = _mm512_mask_blend_epi16(0xaaaaaaaa, scale_of(2*ib), _mm512_slli_epi32(scale_of(2*ib+1), 16));
                for (int iy = 0; iy < nrc_y; ++iy) {
                    auto bsums = (const FourBytes *)q8.y[iy][ibl].bsums;
                    isum[iy] = _mm512_dpwssd_epi32(isum[iy], pair, _mm512_set1_epi32(bsums[ib]));
                }
            }
            for (int iy = 0; iy < nrc_y; ++iy) isum[iy] = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(isum[iy], 5));
            for (int ib = 0; ib < QK_K/32; ++ib) {
                rows.template prefetch<QK_K/32>(ibl, ib);
                for (int k = 0; k < 4; ++k) qx[k] = _mm512_loadu_si512(rows.block(k, ibl).ql + 64*ib);
                transpose_lanes(qx, lanes);
                __m256i h[4];
                for (int k = 0; k < 4; ++k) h[k] = _mm256_loadu_si256((const __m256i *)rows.block(k, ibl).qh + ib);
                auto h01 = _mm512_inserti64x4(_mm512_castsi256_si512(h[0]), h[1], 1);
                auto h23 = _mm512_inserti64x4(_mm512_castsi256_si512(h[2]), h[3], 1);
                const __m512i hbits[2] = {_mm512_shuffle_i64x2(h01, h23, 0x88), _mm512_shuffle_i64x2(h01, h23, 0xdd)};
                for (int j = 0; j < 2; ++j) { // values 0 to 15, 16 to 31
                    qx[0] = _mm512_or_si512(_mm512_and_si512(lanes[j+0], m4), _mm512_and_si512(_mm512_slli_epi16(hbits[j], 4), m30));
                    qx[1] = _mm512_or_si512(_mm512_and_si512(lanes[j+2], m4), _mm512_and_si512(hbits[j], m30));
                    qx[2] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(lanes[j+0], 4), m4), _mm512_and_si512(_mm512_slli_epi16(hbits[j], 2), m30));
                    qx[3] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(lanes[j+2], 4), m4), _mm512_and_si512(_mm512_srli_epi16(hbits[j], 2), m30));
                    auto scale = scale_of(2*ib+j);
                    for (int iy = 0; iy < nrc_y; ++iy) {
                        auto sum = dot_16_rows<4>(qx, q8.y[iy][ibl].qs + 32*ib + 16*j, _mm512_setzero_si512());
                        isum[iy] = _mm512_add_epi32(isum[iy], _mm512_mullo_epi32(scale, sum));
                    }
                }
            }
            for (int iy = 0; iy < nrc_y; ++iy) {
                acc[iy] = _mm512_fmadd_ps(_mm512_mul_ps(dx, _mm512_set1_ps(q8.scale(iy, ibl))), _mm512_cvtepi32_ps(isum[iy]), acc[iy]);
            }
        }
        for (int iy = 0; iy < nrc_y; ++iy) info.store(ix, iy, acc[iy]);
    }
}

#else
#define mul_mat_q4_k_16_rows mul_mat_q4_k_r4_q8_k
#define mul_mat_q5_k_16_rows mul_mat_q5_k_r4_q8_k
#define mul_mat_q6_k_16_rows mul_mat_q6_k_r4_q8_k
#endif
