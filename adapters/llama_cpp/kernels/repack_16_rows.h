// Where a processor has 512 bits (HAVE_FANCY_SIMD), the blocks of four groups of four interleaved rows take turns: sixteen
// rows are one stream of memory, which its prefetcher follows. Included by iqk_quantize.cpp, whose types it uses.
#ifdef HAVE_FANCY_SIMD

#define ROWS_TOGETHER 16
#define REPACK_ROWS(row, block, repack) repack_16_rows<row, block, repack>

template <typename Row, typename Block, void (*repack)(int, int, const Row *, Block *, bool)>
static void repack_16_rows(int nrows, int n_per_row, const Row * x, Block * y, bool online) {
    GGML_ASSERT(nrows%16 == 0);
    const int nbl = n_per_row/QK_K;
    std::vector<Block> groups(4*nbl);
    for (int row = 0; row < nrows; row += 16, x += 16*nbl, y += 4*nbl) {
        repack(16, n_per_row, x, groups.data(), online);
        for (int ibl = 0; ibl < nbl; ++ibl) {
            for (int k = 0; k < 4; ++k) y[4*ibl + k] = groups[k*nbl + ibl];
        }
    }
}

#else

#define ROWS_TOGETHER 4
#define REPACK_ROWS(row, block, repack) repack

#endif
