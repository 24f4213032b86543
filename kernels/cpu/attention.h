// Paged attention and what writes the pool it reads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "abi.h"
#include "pool.h"
#include "weight.h"

namespace tokenmill {

// The pool holds, for each block and layer, head by head: K as [head_dim][block size, rounded up to 8], so that scores of
// 8 keys are computed at once, then V as [block size][head_dim, rounded up to 8]; of int8 then the float32 scales of the
// keys, [block size, rounded up to 8], and those of the values.
struct KvLayout {
    explicit KvLayout(const TmAttention& sizes);

    int64_t keys;        // block size, rounded up to 8
    int64_t value_width;  // head_dim, rounded up to 8
    int64_t scales;  // elements from a head's keys to their scales
    int64_t head_elements;
    int64_t block_bytes;
};

class Attention {
  public:
    explicit Attention(const TmAttention& sizes) : sizes_(sizes), layout_(sizes) {}

    // To be called once before the operations of a step.
    void plan(const TmStep& step, int threads);

    // qkv rows: num_heads query heads, then the key heads, then the value heads. q gets the rotated queries, times
    // log2(e) / sqrt(head_dim). Rotation pairs element i with i + head_dim / 2.
    void rope_and_write(Pool& pool, const TmStep& step, const Buffer& qkv, const Buffer& q, int layer);

    // Causal: the query at position p attends to positions 0..p of its sequence, all in the pool; with a window, to the
    // last `window` of these.
    void attend(Pool& pool, const TmStep& step, const Buffer& q, const Buffer& out, int layer, int64_t window);

  private:
    // A piece of work: the queries `begin`..`end` of a sequence (flat tokens), one KV head, some splits of its context.
    struct Task {
        int64_t begin, end;
        int64_t sequence;
        int32_t kv_head;
        int32_t split;  // -1: all splits, one after the other
        int64_t partial;  // where the result goes, with split >= 0
    };
    struct Fold {
        int64_t token;
        int32_t kv_head;
        int64_t partial;
        int64_t splits;
        int64_t stride;  // partials from one split to the next
    };
    struct Scratch {
        std::vector<float> scores, values, total;
        std::vector<const float*> queries;
        std::vector<int64_t> positions;
    };

    template <class Element>
    void write(const TmStep& step, const Buffer& qkv, const Buffer& q, int layer, int64_t token,
               Scratch& scratch) const;
    template <class Element>
    void attend_task(const TmStep& step, const Buffer& q, const Buffer& out, int layer, int64_t window,
                     const Task& task, const Task* next, Scratch& scratch);
    template <class Element>
    void attend_split(const TmStep& step, const float* const* queries, const int64_t* positions, int rows, int layer,
                      int64_t window, const Task& task, int64_t split, const Task* next, Scratch& scratch,
                      float* state) const;
    // Memory for the threads: before they start, as one that fails can't say so.
    void reserve(int threads);
    // A few rows at a time keeps scores and states in the cache; any number gives the same result.
    int64_t tokens_at_once() const { return std::max<int64_t>(1, 48 / group()); }
    // Query heads of a KV head; 1 where a recording has no attention.
    int group() const { return std::max(1, sizes_.num_heads / sizes_.num_kv_heads); }
    void finish(const Buffer& out, int64_t token, int head, const float* state) const;
    int64_t state_width() const { return layout_.value_width + 2; }

    TmAttention sizes_;
    KvLayout layout_;
    std::vector<Task> tasks_;
    std::vector<Fold> folds_;
    std::vector<float> partials_;
    std::vector<Scratch> scratch_;
};

}  // namespace tokenmill
