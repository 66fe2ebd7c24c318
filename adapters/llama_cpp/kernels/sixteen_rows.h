// Sixteen rows of weights as repack_16_rows.h arranged them. For processors with 512 bits (HAVE_FANCY_SIMD).
#pragma once

typedef int32_t __attribute__((may_alias, aligned(1))) FourBytes;

// Groups of interleaved rows, whose blocks take turns.
template <typename Block, int groups> struct SixteenRows {
    const Block * first;

    SixteenRows(const void * vx, size_t bx, int ix) : first((const Block *)((const char *)vx + ix*bx)) {}
    inline const Block & block(int k, int ibl) const { return first[groups*ibl + k]; }
    // Memory is asked for what comes next: on an EPYC of family 26 half as far, or as far again, took 5 % longer.
    template <int blocks = 1> inline void prefetch(int ibl) const {
        constexpr size_t ahead = 4096;
        auto next = (const char *)(first + groups*ibl) + ahead;
        for (size_t at = 0; at < blocks*groups*sizeof(Block); at += 64) _mm_prefetch(next + at, _MM_HINT_T0);
    }
};

// Adds products of four values in qx[j], of each row, and the j-th four of y.
template <int count> inline __m512i dot_16_rows(const __m512i * qx, const int8_t * y, __m512i sum) {
    auto v = (const FourBytes *)y;
    for (int j = 0; j < count; ++j) sum = _mm512_dpbusd_epi32(sum, qx[j], _mm512_set1_epi32(v[j]));
    return sum;
}
