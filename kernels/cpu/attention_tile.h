// Products of attention over one tile: scores of its keys, and its values weighted.
//
// A register tile of R rows by V vectors changes how often keys and values are loaded, never the operations of a result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace tokenmill {

// Of the one file that includes this: compilers inline what only it can call.
namespace {

constexpr int64_t kTile = 64;  // key positions; rounded down to whole blocks, at least one

// What an operation reads of a tile. Blocks lie scattered, so that the hardware guesses wrong what comes next: the first
// rows ask for what is read a tile later, piece by piece as they go, since many requests at once are in each other's way.
template <class Element>
struct TileBlocks {
    const Element* blocks[kTile];
    int64_t ahead[kTile];  // elements from a block to the one a tile later; 0 where there is none
    int64_t count;
};

// sums[r][v] += factor(r) * vector(v); of the two, the fewer are kept in registers.
template <int R, int V, class Factor, class Vector>
inline void multiply_add(F8 (&sums)[R][V], const Factor& factor, const Vector& vector) {
    if constexpr (R < V) {
        F8 factors[R];
        for (int r = 0; r < R; r++) factors[r] = factor(r);
        for (int v = 0; v < V; v++) {
            const F8 x = vector(v);
            for (int r = 0; r < R; r++) sums[r][v] = fma(x, factors[r], sums[r][v]);
        }
    } else {
        F8 vectors[V];
        for (int v = 0; v < V; v++) vectors[v] = vector(v);
        for (int r = 0; r < R; r++) {
            const F8 x = factor(r);
            for (int v = 0; v < V; v++) sums[r][v] = fma(vectors[v], x, sums[r][v]);
        }
    }
}

// scores[r][0..8V) = q[r] . K; vector v holds 8 keys of one block as [dim][keys], ahead[v] as above.
template <int R, int V, bool First, class Element>
void score_vectors(const float* const* q, const Element* const* k, const int64_t* ahead, int64_t dim, int64_t keys,
                   float* scores, int64_t stride) {
    F8 sums[R][V];
    for (auto& row : sums) {
        for (auto& sum : row) sum = zero8();
    }
    for (int64_t d = 0; d < dim; d++) {
        for (int v = 0; First && v < V; v++) {
            // Two vectors of a block mostly share a line.
            if (v == 0 || k[v] != k[v - 1] + 8) prefetch(k[v] + d * keys + ahead[v], 1);
        }
        multiply_add<R, V>(sums, [&](int r) { return set8(q[r][d]); }, [&](int v) { return load8(k[v] + d * keys); });
    }
    for (int r = 0; r < R; r++) {
        for (int v = 0; v < V; v++) store8(scores + r * stride + 8 * v, sums[r][v]);
    }
}

// As many of the rows from `r` on as come in groups of R, with one vector or V at a time; the next row.
template <int R, int V, class Element>
int score_rows(const float* const* q, int r, int rows, const Element* const* k, const int64_t* ahead, int vectors,
               int64_t dim, int64_t keys, float* scores, int64_t stride) {
    for (; r + R <= rows; r += R) {
        float* to = scores + r * stride;
        int v = 0;
        for (; v + V <= vectors; v += V) {
            if (r == 0) score_vectors<R, V, true>(q, k + v, ahead + v, dim, keys, to + 8 * v, stride);
            else score_vectors<R, V, false>(q + r, k + v, ahead + v, dim, keys, to + 8 * v, stride);
        }
        for (; v < vectors; v++) {
            if (r == 0) score_vectors<R, 1, true>(q, k + v, ahead + v, dim, keys, to + 8 * v, stride);
            else score_vectors<R, 1, false>(q + r, k + v, ahead + v, dim, keys, to + 8 * v, stride);
        }
    }
    return r;
}

// Scores of a tile; those of each block follow those of the one before.
template <class Element>
void score_tile(const float* const* q, int rows, const TileBlocks<Element>& tile, int64_t dim, int64_t keys,
                float* scores, int64_t stride) {
    constexpr int kVectors = 4;  // at a time: their keys stay in the first-level cache for all rows
    const int64_t per_block = keys / 8, vectors = tile.count * per_block;
    for (int64_t first = 0; first < vectors; first += kVectors) {
        const int count = static_cast<int>(std::min<int64_t>(kVectors, vectors - first));
        const Element* k[kVectors];
        int64_t ahead[kVectors];
        for (int v = 0; v < count; v++) {
            const int64_t block = (first + v) / per_block;
            k[v] = tile.blocks[block] + (first + v) % per_block * 8;
            ahead[v] = tile.ahead[block];
        }
        float* to = scores + 8 * first;
        int r = score_rows<6, 2>(q, 0, rows, k, ahead, count, dim, keys, to, stride);
        r = score_rows<3, 4>(q, r, rows, k, ahead, count, dim, keys, to, stride);
        score_rows<1, 4>(q, r, rows, k, ahead, count, dim, keys, to, stride);
    }
}

// The values of a tile: those of each block are [count][width].
template <class Element>
struct Values {
    const TileBlocks<Element>& tile;
    int64_t offset;  // from a block to its values
    int64_t width;
    int64_t keys;  // weights of a block
    int64_t block_size;
    int64_t last;  // values of the last block

    int64_t count(int64_t block) const { return block + 1 < tile.count ? block_size : last; }
};

// out[r] += sum over the tile's keys of weights[r][key] * value[key].
template <int R, int V, bool First, class Element>
void weigh_vectors(const float* weights, int64_t stride, const Values<Element>& values, int64_t column, float* out,
                   int64_t out_stride) {
    F8 sums[R][V];
    for (int r = 0; r < R; r++) {
        for (int v = 0; v < V; v++) sums[r][v] = load8(out + r * out_stride + column + 8 * v);
    }
    for (int64_t block = 0; block < values.tile.count; block++) {
        const Element* first = values.tile.blocks[block] + values.offset + column;
        const float* weight = weights + block * values.keys;
        const int64_t ahead = values.tile.ahead[block], count = values.count(block);
        for (int64_t key = 0; key < count; key++) {
            const Element* from = first + key * values.width;
            if (First) prefetch(from + ahead, V * 8 * sizeof(Element));
            multiply_add<R, V>(
                sums, [&](int r) { return set8(weight[r * stride + key]); }, [&](int v) { return load8(from + 8 * v); });
        }
    }
    for (int r = 0; r < R; r++) {
        for (int v = 0; v < V; v++) store8(out + r * out_stride + column + 8 * v, sums[r][v]);
    }
}

// As score_rows.
template <int R, int V, class Element>
int weigh_rows(const float* weights, int64_t stride, int r, int rows, const Values<Element>& values, float* out,
               int64_t out_stride) {
    for (; r + R <= rows; r += R) {
        const float* weight = weights + r * stride;
        float* to = out + r * out_stride;
        int64_t column = 0;
        for (; column + 8 * V <= values.width; column += 8 * V) {
            if (r == 0) weigh_vectors<R, V, true>(weight, stride, values, column, to, out_stride);
            else weigh_vectors<R, V, false>(weight, stride, values, column, to, out_stride);
        }
        for (; column < values.width; column += 8) {
            if (r == 0) weigh_vectors<R, 1, true>(weight, stride, values, column, to, out_stride);
            else weigh_vectors<R, 1, false>(weight, stride, values, column, to, out_stride);
        }
    }
    return r;
}

template <class Element>
void weigh_tile(const float* weights, int64_t stride, int rows, const Values<Element>& values, float* out,
                int64_t out_stride) {
    int r = weigh_rows<6, 2>(weights, stride, 0, rows, values, out, out_stride);
    r = weigh_rows<3, 4>(weights, stride, r, rows, values, out, out_stride);
    weigh_rows<1, 4>(weights, stride, r, rows, values, out, out_stride);
}

}  // namespace

}  // namespace tokenmill
