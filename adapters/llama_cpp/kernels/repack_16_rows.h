// Where a processor has 512 bits (HAVE_FANCY_SIMD), the blocks of groups of interleaved rows take turns: sixteen rows are
// one stream of memory, which its prefetcher follows. Included by iqk_quantize.cpp, whose types it uses.
#ifdef HAVE_FANCY_SIMD

#define ROWS_TOGETHER(rows) 16
#define REPACK_ROWS(row, block, repack, rows, values) repack_16_rows<row, block, repack, rows, values>

// `rows` of weights are a group, and `values` of each are a block.
template <typename Row, typename Block, void (*repack)(int, int, const Row *, Block *, bool), int rows, int values>
static void repack_16_rows(int nrows, int n_per_row, const Row * x, Block * y, bool online) {
    GGML_ASSERT(nrows%16 == 0);
    const int nbl = n_per_row/values, ngroups = 16/rows;
    std::vector<Block> groups(ngroups*nbl);
    for (int row = 0; row < nrows; row += 16, x += 16*nbl, y += ngroups*nbl) {
        repack(16, n_per_row, x, groups.data(), online);
        for (int ibl = 0; ibl < nbl; ++ibl) {
            for (int k = 0; k < ngroups; ++k) y[ngroups*ibl + k] = groups[k*nbl + ibl];
        }
    }
}

#else

#define ROWS_TOGETHER(rows) rows
#define REPACK_ROWS(row, block, repack, rows, values) repack

#endif
