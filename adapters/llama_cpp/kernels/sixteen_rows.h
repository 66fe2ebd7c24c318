// Sixteen rows of weights as repack_16_rows.h arranged them. For processors with 512 bits (HAVE_FANCY_SIMD).
#pragma once

typedef int32_t __attribute__((may_alias, aligned(1))) FourBytes;

// Groups of interleaved rows, whose blocks take turns.
template <typename Block, int groups> struct SixteenRows {
    const Block * first;

    SixteenRows(const void * vx, size_t bx, int ix) : first((const Block *)((const char *)vx + ix*bx)) {}
    inline const Block & block(int k, int ibl) const { return first[groups*ibl + k]; }
    // Memory is asked for what comes next, a part of the blocks at a time, into the second cache: asked for at once, or
    // into the first one, an EPYC of family 25 took twice as long (docs/adr/0150-sixteen-rows-of-weights.md).
    template <int parts = 1> inline void prefetch(int ibl, int part = 0) const {
        constexpr size_t ahead = 8192, size = groups*sizeof(Block)/parts;
        auto next = (const char *)(first + groups*ibl) + ahead + part*size;
        for (size_t at = 0; at < size; at += 64) _mm_prefetch(next + at, _MM_HINT_T1);
    }
};

// Adds products of four values in qx[j], of each row, and the j-th four of y.
template <int count> inline __m512i dot_16_rows(const __m512i * qx, const int8_t * y, __m512i sum) {
    auto v = (const FourBytes *)y;
    for (int j = 0; j < count; ++j) sum = _mm512_dpbusd_epi32(sum, qx[j], _mm512_set1_epi32(v[j]));
    return sum;
}
