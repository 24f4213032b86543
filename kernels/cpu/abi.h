// The C interface: what `kernels/cpu/library.py` mirrors, field by field.
//
// A model step is a list of operations on numbered buffers, recorded once and run by one call for any batch.
#pragma once

#include <cstdint>

extern "C" {

enum TmCode : int32_t {
    TM_EMBED = 0,      // out = rows of `weight` for the step's token ids less `first`; zeros for ids it has no row for
    TM_NORM = 1,       // residual (in2) += in, unless in is -1; out = rmsnorm(residual) * norm
    TM_LINEAR = 2,     // out = in * weight + bias
    TM_GATED = 3,      // out = activation(gate) * up; `weight` has 32 gate columns, 32 up columns, and so on
    TM_ROPE = 4,       // in: q, k, v of each token; out = rotated, scaled q; k and v go into the KV pool
    TM_ATTENTION = 5,  // out = attention of q (in) over the KV pool
    TM_LOGITS = 6,     // the step's logits = in * weight + bias
};

enum TmFlags : int32_t {
    TM_GELU = 1,         // TM_GATED: gelu (tanh form) instead of silu
    TM_LOGITS_ROWS = 2,  // TM_NORM: only the rows whose logits are wanted, in their order
};

struct TmOp {
    int32_t code;
    int32_t flags;
    int32_t in;
    int32_t in2;
    int32_t out;
    int32_t layer;
    float eps;
    int32_t first;       // TM_EMBED
    const void* weight;  // Weight, or for TM_NORM float [width]
    int32_t window;      // TM_ATTENTION: last positions that a query attends to, its own included; 0: all
    int32_t unused;
};

// Quantized forms of activations, with scales of groups of 32.
enum TmCodes : int32_t {
    TM_CODES16 = 1,  // int16, for int8 weights
    TM_CODES8 = 2,   // int8, and the largest values of a row apart, for int4 weights
};

struct TmBuffer {
    int64_t width;
    int32_t codes;  // TmCodes that it has, besides its float32 values
    int32_t unused;
};

// How keys and values are kept in the pool; they are float32 before and after.
enum TmKvType : int32_t {
    TM_KV_FLOAT32 = 0,
    TM_KV_BFLOAT16 = 1,
    TM_KV_FLOAT16 = 2,
    TM_KV_INT8 = 3,  // each key and each value of a head with a scale of its own
};

// Shapes of attention and the KV pool.
struct TmAttention {
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t block_size;
    int64_t num_layers;
    int32_t kv_type;  // TmKvType
    int32_t unused;
    const float* cos;  // [positions, head_dim / 2]
    const float* sin;
    void* kv;  // [blocks, num_layers, tm_kv_block_bytes]
};

struct TmStep {
    int64_t tokens;      // T
    int64_t sequences;   // B
    int64_t rows;        // S, whose logits are wanted
    int64_t table_width;
    int64_t* token_ids;     // [T]
    int64_t* positions;     // [T]
    int64_t* slots;         // [T]
    int64_t* query_starts;  // [B + 1]
    int64_t* context_lens;  // [B]
    const int32_t* block_tables;  // [any, table_width]
    int64_t* table_rows;    // [B], which of the block tables
    int64_t* logits_rows;   // [S]
    float* logits;          // [S, n of the TM_LOGITS weight]; nullptr: not wanted
    int64_t* best_ids;      // [S], instead: the lowest index of the largest logit, -1 if any is NaN
};

// What S rows of logits ask for (`gpu_workers/sampling.py`).
struct TmSampling {
    int64_t rows;  // S
    int64_t vocab_size;
    const float* logits;       // [S, vocab_size]
    const float* temperature;  // [S]; 0: the lowest id of the largest logit
    const int64_t* top_k;      // [S], 0: off
    const double* top_p;       // [S]
    const float* min_p;        // [S]
    const double* uniforms;    // [S], in (0, 1)
    int64_t* ids;              // [S], filled in; -1: the logits are not numbers
};

// The requests a rank knows (`gpu_workers/rows.py`).
struct TmRows {
    int64_t max_seqs;
    int64_t max_model_len;
    int64_t max_blocks;
    int64_t block_size;
    const int32_t* tokens;        // [max_seqs, max_model_len + 1]
    const int64_t* num_tokens;    // [max_seqs]
    const int32_t* block_tables;  // [max_seqs, max_blocks]
    const int64_t* num_blocks;    // [max_seqs]
    const uint8_t* in_use;        // [max_seqs]
};

// All return nullptr, or a negative number, when memory is lacking. The library checks no shapes: its callers do.
void* tm_engine_new(int32_t threads);
// Binds each thread but the caller's, which is the first, to a CPU of its own, cpus[1] and so on. A negative number: the
// system refuses.
int32_t tm_engine_pin(void* engine, const int32_t* cpus);
void tm_engine_free(void* engine);
// Bytes of one layer's part of a block; `sizes.kv` and its tables are not looked at.
int64_t tm_kv_block_bytes(const TmAttention* sizes);
int32_t tm_engine_set_attention(void* engine, const TmAttention* sizes);
int32_t tm_engine_set_buffers(void* engine, const TmBuffer* buffers, int32_t count);
int32_t tm_engine_run(void* engine, const TmOp* ops, int32_t count, const TmStep* step);
int32_t tm_engine_sample(void* engine, const TmSampling* sampling);
// Fills in everything of `step` but `logits` and `best_ids` from `count` scheduled int32 [row, start, count, sample]; its
// arrays have room for `capacity` tokens and for max_seqs sequences. Returns T: if it is more than `capacity`, or -1 because
// an entry does not fit the rows or memory is lacking, `step` is not to be used.
int64_t tm_flatten(const TmRows* rows, const void* scheduled, int64_t count, int64_t capacity, TmStep* step);
// The memory of a buffer's values for at least `rows` rows, until the next run or call with more rows.
void* tm_engine_values(void* engine, int32_t index, int64_t rows);

void* tm_weight_new(int32_t kind, int64_t n, int64_t k);
void tm_weight_free(void* weight);
int64_t tm_weight_bytes(const void* weight);
void tm_weight_pack_float(void* weight, const float* source);
void tm_weight_pack_int4(void* weight, const uint8_t* codes, const float* scales, const float* minimums);
void tm_weight_pack_int8(void* weight, const int8_t* codes, const float* scales);
int32_t tm_weight_set_bias(void* weight, const float* bias);
}
