// From the scheduled rows of a plan to the flat batch of a step, as `gpu_workers/prepare.py` does it with numpy: some forty
// calls of Python, which find the caches full of weights in every step, take longer than this.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <vector>

#include "abi.h"

namespace {

struct Scheduled {
    int32_t row, start, count, sample;
};

// Of a message, in which it may lie anywhere.
Scheduled entry_at(const unsigned char* scheduled, int64_t index) {
    Scheduled entry;
    std::memcpy(&entry, scheduled + index * static_cast<int64_t>(sizeof entry), sizeof entry);
    return entry;
}

// Whether the row's tokens are known, have blocks, and are sampled from where the next one is not.
bool fits(const TmRows& rows, const Scheduled& entry) {
    if (entry.row < 0 || entry.row >= rows.max_seqs || !rows.in_use[entry.row]) return false;
    if (entry.start < 0 || entry.count < 1 || (entry.sample != 0 && entry.sample != 1)) return false;
    const int64_t end = int64_t{entry.start} + entry.count, known = rows.num_tokens[entry.row];
    const int64_t room = std::min(rows.max_model_len, rows.num_blocks[entry.row] * rows.block_size);
    return end <= std::min(known, room) && (entry.sample == 0 || end == known);
}

int64_t flatten(const TmRows& rows, const unsigned char* scheduled, int64_t count, int64_t capacity, TmStep& step) {
    if (count > rows.max_seqs) return -1;
    std::vector<bool> seen(static_cast<size_t>(rows.max_seqs));
    int64_t tokens = 0;
    for (int64_t i = 0; i < count; i++) {
        const Scheduled entry = entry_at(scheduled, i);
        if (!fits(rows, entry) || seen[static_cast<size_t>(entry.row)]) return -1;
        seen[static_cast<size_t>(entry.row)] = true;
        tokens += entry.count;
    }
    if (tokens > capacity) return tokens;
    step.tokens = tokens;
    step.sequences = count;
    step.rows = 0;
    step.table_width = rows.max_blocks;
    step.block_tables = rows.block_tables;
    step.query_starts[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        const Scheduled entry = entry_at(scheduled, i);
        const int32_t* ids = rows.tokens + entry.row * (rows.max_model_len + 1);
        const int32_t* table = rows.block_tables + entry.row * rows.max_blocks;
        const int64_t first = step.query_starts[i];
        for (int64_t k = 0; k < entry.count; k++) {
            const int64_t position = entry.start + k;
            step.token_ids[first + k] = ids[position];
            step.positions[first + k] = position;
            step.slots[first + k] = table[position / rows.block_size] * rows.block_size + position % rows.block_size;
        }
        step.query_starts[i + 1] = first + entry.count;
        step.context_lens[i] = int64_t{entry.start} + entry.count;
        step.table_rows[i] = entry.row;
        if (entry.sample) step.logits_rows[step.rows++] = step.query_starts[i + 1] - 1;
    }
    return tokens;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t tm_flatten(const TmRows* rows, const void* scheduled, int64_t count,
                                                                     int64_t capacity, TmStep* step) {
    try {
        return flatten(*rows, static_cast<const unsigned char*>(scheduled), count, capacity, *step);
    } catch (const std::exception&) {
        return -1;
    }
}
