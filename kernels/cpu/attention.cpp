// Attention over key tiles of 64 positions with a running softmax (Dao et al. 2022), restarted every 512 positions; the
// splits' results are then merged in order (split-KV decoding, Dao et al. 2023).
//
// A query's operations are the same whether it is decoded alone or is one of a prefill chunk: tiles and splits are counted
// from position 0 of its sequence, and keys beyond its position or in front of its window weigh exactly 0: what lies wholly
// in front of the windows of all queries of a task is left out, and the results are the same.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention_tile.h"
#include "simd.h"

namespace tokenmill {

namespace {

constexpr int64_t kSplit = 512;      // key positions of a split, likewise
constexpr int64_t kQueryTokens = 16;  // of a prefill chunk, in one task
constexpr int64_t kMostPartials = 16 << 20;  // floats for the results of splits
constexpr float kLog2E = 1.44269504f;  // scores are in powers of two
constexpr float kNothing = -1e30f;   // largest score where no key is seen: finite, so that differences are not NaN

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// The first position that the query at `position` attends to.
int64_t first_seen(int64_t position, int64_t window) {
    return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
}

// Whether the pool's elements are codes, with a scale for each key and value of a head.
template <class Element>
constexpr bool kCodes = std::is_same_v<Element, int8_t>;

// A key or value as it is kept, `count` numbers, a multiple of 8; returns the scale of codes.
template <class Element>
float to_elements(const float* from, int64_t count, Element* to) {
    if constexpr (!kCodes<Element>) {
        for (int64_t i = 0; i < count; i += 8) store8(to + i, load8(from + i));
        return 1.0f;
    } else {
        F8 most = zero8();
        for (int64_t i = 0; i < count; i += 8) most = max8(most, abs8(load8(from + i)));
        const float largest = largest8(most);
        const F8 inverse = set8(largest > 1e-30f ? 127.0f / largest : 0.0f);  // below, it would overflow
        F8 sum = zero8();
        for (int64_t i = 0; i < count; i += 8) {
            const F8 codes = round8(load8(from + i) * inverse);
            sum = sum + codes;
            // Codes can't say NaN: the scale does, and all of them are worth that.
            if (std::isnan(sum8(sum))) return NAN;
            float whole[8];
            store8(whole, codes);
            for (int c = 0; c < 8; c++) to[i + c] = static_cast<int8_t>(whole[c]);
        }
        return largest > 1e-30f ? largest / 127.0f : 0.0f;
    }
}

// row[key] *= the key's scale, or the value's, for all keys of a tile; `offset`: from a block to the scales.
template <class Element>
void scale_tile(const TileBlocks<Element>& tile, int64_t offset, int64_t keys, float* row) {
    for (int64_t block = 0; block < tile.count; block++, row += keys) {
        const auto* scales = reinterpret_cast<const float*>(tile.blocks[block] + offset);
        for (int64_t i = 0; i < keys; i += 8) store8(row + i, load8(row + i) * load8(scales + i));
    }
}

int64_t element_bytes(int32_t kv_type) {
    switch (kv_type) {
        case TM_KV_FLOAT32: return 4;
        case TM_KV_INT8: return 1;
        default: return 2;
    }
}

// body(a value of the pool's type)
template <class Body>
void with_element(int32_t kv_type, const Body& body) {
    if (kv_type == TM_KV_FLOAT16) body(Half{});
    else if (kv_type == TM_KV_BFLOAT16) body(bf16{});
    else if (kv_type == TM_KV_INT8) body(int8_t{});
    else body(0.0f);
}

// A query's state: weighted values [value width], largest score, sum of weights.
void reset(float* state, int64_t width) {
    std::fill(state, state + width, 0.0f);
    state[width] = kNothing;
    state[width + 1] = 0.0f;
}

// total and part as if their keys had been seen in one softmax, in total.
void merge(float* total, const float* part, int64_t width) {
    if (part[width + 1] == 0.0f) return;  // it has seen none
    if (total[width + 1] == 0.0f) {  // as if part were the first
        std::copy(part, part + width + 2, total);
        return;
    }
    const float largest = std::max(total[width], part[width]);
    const float keep = exp2_of(total[width] - largest), add = exp2_of(part[width] - largest);
    for (int64_t i = 0; i < width; i += 8) {
        store8(total + i, fma(load8(part + i), set8(add), load8(total + i) * set8(keep)));
    }
    total[width] = largest;
    total[width + 1] = part[width + 1] * add + total[width + 1] * keep;
}

}  // namespace

KvLayout::KvLayout(const TmAttention& sizes)
    : keys(round_up(sizes.block_size, 8)),
      value_width(round_up(sizes.head_dim, 8)),
      scales(sizes.head_dim * keys + sizes.block_size * value_width),
      head_elements(scales + (sizes.kv_type == TM_KV_INT8 ? 2 * keys * static_cast<int64_t>(sizeof(float)) : 0)),
      block_bytes(round_up(head_elements * sizes.num_kv_heads * element_bytes(sizes.kv_type), 64)) {}

template <class Element>
void Attention::write(const TmStep& step, const Buffer& qkv, const Buffer& q, int layer, int64_t token,
                      Scratch& scratch) const {
    const int64_t dim = sizes_.head_dim, half = dim / 2, heads = sizes_.num_heads, kv_heads = sizes_.num_kv_heads;
    const float* in = qkv.values + token * qkv.width;
    const float* cos = sizes_.cos + step.positions[token] * half;
    const float* sin = sizes_.sin + step.positions[token] * half;
    const float scale = kLog2E / std::sqrt(static_cast<float>(dim));
    float* to = q.values + token * q.width;
    for (int64_t head = 0; head < heads; head++, in += dim, to += dim) {
        for (int64_t i = 0; i < half; i++) {
            to[i] = (in[i] * cos[i] - in[i + half] * sin[i]) * scale;
            to[i + half] = (in[i + half] * cos[i] + in[i] * sin[i]) * scale;
        }
    }
    const int64_t block = step.slots[token] / sizes_.block_size, offset = step.slots[token] % sizes_.block_size;
    auto* pool = static_cast<unsigned char*>(sizes_.kv) + (block * sizes_.num_layers + layer) * layout_.block_bytes;
    const int64_t padded = layout_.value_width;
    float* values = scratch.scores.data();
    auto* elements = reinterpret_cast<Element*>(values + padded);
    const auto head_of = [&](int64_t head) { return reinterpret_cast<Element*>(pool) + head * layout_.head_elements; };
    const auto set_scale = [&](Element* of_head, int64_t index, float scale) {
        if constexpr (kCodes<Element>) std::memcpy(of_head + layout_.scales + 4 * index, &scale, 4);
    };
    std::fill(values, values + padded, 0.0f);
    for (int64_t head = 0; head < kv_heads; head++, in += dim) {
        for (int64_t i = 0; i < half; i++) {
            values[i] = in[i] * cos[i] - in[i + half] * sin[i];
            values[i + half] = in[i + half] * cos[i] + in[i] * sin[i];
        }
        Element* k = head_of(head);
        set_scale(k, offset, to_elements(values, padded, elements));
        for (int64_t i = 0; i < dim; i++) k[i * layout_.keys + offset] = elements[i];
    }
    for (int64_t head = 0; head < kv_heads; head++, in += dim) {
        std::copy(in, in + dim, values);
        Element* k = head_of(head);
        set_scale(k, layout_.keys + offset, to_elements(values, padded, elements));
        std::copy(elements, elements + dim, k + dim * layout_.keys + offset * padded);
    }
}

void Attention::rope_and_write(Pool& pool, const TmStep& step, const Buffer& qkv, const Buffer& q, int layer) {
    constexpr int64_t kTokens = 4;
    pool.run((step.tokens + kTokens - 1) / kTokens, [&](int64_t task, int thread) {
        for (int64_t token = task * kTokens; token < std::min((task + 1) * kTokens, step.tokens); token++) {
            with_element(sizes_.kv_type, [&](auto element) {
                write<decltype(element)>(step, qkv, q, layer, token, scratch_[thread]);
            });
        }
    });
}

void Attention::reserve(int threads) {
    const int64_t most_rows = tokens_at_once() * group();
    const int64_t tile_keys = std::max<int64_t>(1, kTile / sizes_.block_size) * layout_.keys;
    scratch_.resize(static_cast<size_t>(threads));
    for (Scratch& scratch : scratch_) {
        scratch.scores.resize(static_cast<size_t>(std::max(most_rows * tile_keys, 2 * layout_.value_width)));
        scratch.values.resize(static_cast<size_t>(most_rows * state_width()));
        scratch.total.resize(static_cast<size_t>(most_rows * state_width()));
        scratch.queries.resize(static_cast<size_t>(most_rows));
        scratch.positions.resize(static_cast<size_t>(most_rows));
    }
}

void Attention::plan(const TmStep& step, int threads) {
    reserve(threads);

    const int64_t blocks = std::max<int64_t>(1, kSplit / sizes_.block_size);
    const int64_t split_keys = blocks * sizes_.block_size;
    const int group = this->group();
    tasks_.clear();
    folds_.clear();
    int64_t partials = 0;
    for (int64_t sequence = 0; sequence < step.sequences; sequence++) {
        const int64_t begin = step.query_starts[sequence], end = step.query_starts[sequence + 1];
        const int64_t query_blocks = (end - begin + kQueryTokens - 1) / kQueryTokens;
        const int64_t splits = (step.context_lens[sequence] + split_keys - 1) / split_keys;
        // Where there are few queries, threads share them by parts of the context: all of them meet a key at once.
        const int64_t results = (end - begin) * sizes_.num_heads * splits;
        const bool apart = splits > 1 && query_blocks * sizes_.num_kv_heads < 4 * threads &&
                           (partials + results) * state_width() <= kMostPartials;
        for (int32_t head = 0; head < sizes_.num_kv_heads; head++) {
            for (int64_t first = begin; first < end; first += kQueryTokens) {
                const int64_t last = std::min(first + kQueryTokens, end);
                if (!apart) {
                    tasks_.push_back({first, last, sequence, head, -1, 0});
                    continue;
                }
                const int64_t rows = (last - first) * group;
                for (int64_t token = first; token < last; token++) {
                    folds_.push_back({token, head, partials + (token - first) * group, splits, rows});
                }
                for (int32_t split = 0; split < splits; split++, partials += rows) {
                    tasks_.push_back({first, last, sequence, head, split, partials});
                }
            }
        }
    }
    // Long ones first, so that none is left for the end.
    const auto products = [&](const Task& task) {
        const int64_t keys = task.split < 0 ? step.positions[task.end - 1] + 1 : split_keys;
        return keys * (task.end - task.begin);
    };
    std::stable_sort(tasks_.begin(), tasks_.end(),
                     [&](const Task& a, const Task& b) { return products(a) > products(b); });
    partials_.resize(static_cast<size_t>(partials * state_width()));
}

template <class Element>
void Attention::attend_split(const TmStep& step, const float* const* queries, const int64_t* positions, int rows,
                             int layer, int64_t window, const Task& task, int64_t split, const Task* next,
                             Scratch& scratch, float* states) const {
    const int64_t block_size = sizes_.block_size, dim = sizes_.head_dim, width = layout_.value_width;
    const int64_t tile_blocks = std::max<int64_t>(1, kTile / block_size);
    const int64_t split_blocks = std::max<int64_t>(1, kSplit / block_size);
    const int64_t last_position = positions[rows - 1];
    const int64_t first_block = split * split_blocks;
    const int64_t end_block = std::min(first_block + split_blocks, last_position / block_size + 1);
    const int64_t stride = tile_blocks * layout_.keys;
    const auto* pool = static_cast<const unsigned char*>(sizes_.kv);
    const auto head_of = [&](const Task& task, int64_t block) {
        const int32_t* table = step.block_tables + step.table_rows[task.sequence] * step.table_width;
        return reinterpret_cast<const Element*>(pool + (table[block] * sizes_.num_layers + layer) * layout_.block_bytes) +
               task.kv_head * layout_.head_elements;
    };
    // What is read after this: this task's next tile, or of the next task its first one, mostly.
    const int64_t task_end = task.split < 0 ? last_position / block_size + 1 : end_block;
    const int64_t next_first = next ? std::max(next->split, 0) * split_blocks : 0;
    const int64_t next_end = next ? step.positions[next->end - 1] / block_size + 1 : 0;
    for (int r = 0; r < rows; r++) reset(states + r * state_width(), width);
    TileBlocks<Element> blocks;
    // The first query is the one that sees furthest back.
    const int64_t unseen_blocks = std::max<int64_t>(0, first_seen(positions[0], window) / block_size - first_block);
    const int64_t first_tile = first_block + unseen_blocks / tile_blocks * tile_blocks;
    for (int64_t tile = first_tile; tile < end_block; tile += tile_blocks) {
        const int64_t tile_end = std::min(tile + tile_blocks, end_block);
        blocks.count = tile_end - tile;
        for (int64_t i = 0; i < blocks.count; i++) {
            blocks.blocks[i] = head_of(task, tile + i);
            blocks.ahead[i] = 0;
            if (tile + i + tile_blocks < task_end) blocks.ahead[i] = head_of(task, tile + i + tile_blocks) - blocks.blocks[i];
            else if (next_first + i < next_end) blocks.ahead[i] = head_of(*next, next_first + i) - blocks.blocks[i];
        }
        score_tile(queries, rows, blocks, dim, layout_.keys, scratch.scores.data(), stride);
        const int64_t count = (tile_end - tile) * layout_.keys;
        for (int r = 0; r < rows; r++) {
            float* row = scratch.scores.data() + r * stride;
            float* state = states + r * state_width();
            if constexpr (kCodes<Element>) scale_tile(blocks, layout_.scales, layout_.keys, row);
            // Keys after the query, and the places that fill up a block, are seen by nobody.
            if (positions[r] < tile_end * block_size - 1 || layout_.keys != block_size) {
                for (int64_t block = tile; block < tile_end; block++) {
                    const int64_t seen = std::clamp<int64_t>(positions[r] - block * block_size + 1, 0, block_size);
                    float* end = row + (block - tile + 1) * layout_.keys;
                    std::fill(row + (block - tile) * layout_.keys + seen, end, -std::numeric_limits<float>::infinity());
                }
            }
            const int64_t first = first_seen(positions[r], window);
            for (int64_t block = tile; block < tile_end && block * block_size < first; block++) {
                float* begin = row + (block - tile) * layout_.keys;
                std::fill(begin, begin + std::min(block_size, first - block * block_size),
                          -std::numeric_limits<float>::infinity());
            }
            F8 most = set8(state[width]);
            for (int64_t i = 0; i < count; i += 8) most = max8(most, load8(row + i));
            const float largest = largest8(most);
            F8 sum = zero8();
            for (int64_t i = 0; i < count; i += 8) {
                const F8 weight = exp2_8(load8(row + i) - set8(largest));
                sum = sum + weight;
                store8(row + i, weight);
            }
            if (state[width] != largest) {  // else all that was summed keeps its weight
                const float keep = exp2_of(state[width] - largest);
                state[width + 1] *= keep;
                for (int64_t i = 0; i < width; i += 8) store8(state + i, load8(state + i) * set8(keep));
                state[width] = largest;
            }
            state[width + 1] += sum8(sum);
            if constexpr (kCodes<Element>) scale_tile(blocks, layout_.scales + 4 * layout_.keys, layout_.keys, row);
        }
        // Places after the last query may never have been written.
        const int64_t last = std::min(block_size, last_position - (tile_end - 1) * block_size + 1);
        const Values<Element> values{blocks, dim * layout_.keys, width, layout_.keys, block_size, last};
        weigh_tile(scratch.scores.data(), stride, rows, values, states, state_width());
    }
}

template <class Element>
void Attention::attend_task(const TmStep& step, const Buffer& q, const Buffer& out, int layer, int64_t window,
                            const Task& task, const Task* next, Scratch& scratch) {
    const int group = this->group();
    const int64_t width = layout_.value_width, blocks = std::max<int64_t>(1, kSplit / sizes_.block_size);
    const float** queries = scratch.queries.data();
    int64_t* positions = scratch.positions.data();
    for (int64_t first = task.begin; first < task.end; first += tokens_at_once()) {
        const int64_t end = std::min(first + tokens_at_once(), task.end);
        int rows = 0;
        for (int64_t token = first; token < end; token++) {
            for (int h = 0; h < group; h++, rows++) {
                queries[rows] = q.values + token * q.width + (task.kv_head * group + h) * sizes_.head_dim;
                positions[rows] = step.positions[token];
            }
        }
        if (task.split >= 0) {
            attend_split<Element>(step, queries, positions, rows, layer, window, task, task.split, next,
                                  scratch, partials_.data() + (task.partial + (first - task.begin) * group) * state_width());
            continue;
        }
        const int64_t splits = positions[rows - 1] / (blocks * sizes_.block_size) + 1;
        const int64_t first_split = first_seen(positions[0], window) / (blocks * sizes_.block_size);
        float* total = scratch.total.data();
        attend_split<Element>(step, queries, positions, rows, layer, window, task, first_split, next, scratch, total);
        for (int64_t split = first_split + 1; split < splits; split++) {
            attend_split<Element>(step, queries, positions, rows, layer, window, task, split, next, scratch,
                                  scratch.values.data());
            for (int r = 0; r < rows; r++) {
                merge(total + r * state_width(), scratch.values.data() + r * state_width(), width);
            }
        }
        for (int r = 0; r < rows; r++) {
            finish(out, first + r / group, task.kv_head * group + r % group, total + r * state_width());
        }
    }
}

void Attention::finish(const Buffer& out, int64_t token, int head, const float* state) const {
    const int64_t dim = sizes_.head_dim, width = layout_.value_width;
    const float inverse = 1.0f / state[width + 1];
    float* to = out.values + token * out.width + head * dim;
    for (int64_t i = 0; i < dim; i++) to[i] = state[i] * inverse;
}

void Attention::attend(Pool& pool, const TmStep& step, const Buffer& q, const Buffer& out, int layer, int64_t window) {
    // In turn: a thread asks for what its next task reads.
    const auto tasks = static_cast<int64_t>(tasks_.size());
    pool.run_in_turn(tasks, [&](int64_t index, int thread) {
        const Task* next = index + 1 < tasks ? &tasks_[index + 1] : nullptr;
        with_element(sizes_.kv_type, [&](auto element) {
            attend_task<decltype(element)>(step, q, out, layer, window, tasks_[index], next, scratch_[thread]);
        });
    });
    const int group = this->group();
    pool.run(static_cast<int64_t>(folds_.size()), [&](int64_t index, int) {
        const Fold& fold = folds_[index];
        for (int h = 0; h < group; h++) {
            float* total = partials_.data() + (fold.partial + h) * state_width();
            for (int64_t split = 1; split < fold.splits; split++) {
                merge(total, total + split * fold.stride * state_width(), layout_.value_width);
            }
            finish(out, fold.token, fold.kv_head * group + h, total);
        }
    });
}

}  // namespace tokenmill
