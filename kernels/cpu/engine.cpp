// Runs a recorded step: every operation in turn, each divided among the threads of the pool.
//
// What does not belong here: products (multiply.cpp), attention (attention.cpp), layouts of weights (weight.cpp).
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "abi.h"
#include "attention.h"
#include "pool.h"
#include "sample.h"
#include "simd.h"
#include "weight.h"

namespace tokenmill {

namespace {

constexpr int kTileRows = 48;    // rows of one product task; with more rows than that, a weight is read several times
constexpr int kTileColumns = 32;  // results of one product task for each row
constexpr int64_t kRowsReserved = 64;  // buffers grow by this many
constexpr int64_t kRowsInline = 4;  // fewer rows are not worth waking a thread for a norm

struct Free {
    void operator()(void* p) const { std::free(p); }
};

// Grows, never shrinks: a steady state allocates nothing.
class Memory {
  public:
    void* reserve(size_t bytes) {
        if (bytes > size_) {
            const size_t rounded = (bytes + 63) / 64 * 64;
            data_.reset();
            data_.reset(std::aligned_alloc(64, rounded));
            if (!data_) {
                size_ = 0;
                throw std::bad_alloc();
            }
            size_ = rounded;
        }
        return data_.get();
    }

  private:
    std::unique_ptr<void, Free> data_;
    size_t size_ = 0;
};

// act(gate) * up, in eights.
void gate_row(const float* gate, const float* up, int count, bool gelu, float* out) {
    for (int i = 0; i < count; i += 8) {
        const F8 x = load8(gate + i);
        F8 y;
        if (gelu) {
            // tanh(u) = 1 - 2 / (1 + e^2u), so 0.5 (1 + tanh(u)) = 1 - 1 / (1 + e^2u)
            const F8 cube = x * x * x;
            const F8 inner = (cube * set8(0.044715f) + x) * set8(2.0f * 0.7978845608f);
            y = x - x / (set8(1.0f) + exp8(inner));
        } else {
            y = x / (set8(1.0f) + exp8(set8(0.0f) - x));
        }
        store8(out + i, y * load8(up + i));
    }
}

// The largest logit that a thread has seen of a row, and the lowest of its ids.
struct Best {
    float value = -std::numeric_limits<float>::infinity();
    int64_t id = 0;
    bool nan = false;

    void look_at(const float* logits, int64_t first, int count) {
        F8 largest = set8(value), unordered = zero8();
        int c = 0;
        for (; c + 8 <= count; c += 8) {
            const F8 x = load8(logits + c);
            largest = max8(x, largest);
            unordered = unordered + (x - x);  // 0, unless a value is infinite or NaN
        }
        // Rarely: a tile that may have a new best one, or something that takes a closer look.
        if (c == count && largest8(largest) <= value && sum8(unordered) == 0.0f && first > id) return;
        for (c = 0; c < count; c++) merge({logits[c], first + c, std::isnan(logits[c])});
    }

    void merge(const Best& other) {
        nan |= other.nan;
        if (other.value > value || (other.value == value && other.id < id)) {
            value = other.value;
            id = other.id;
        }
    }
};

}  // namespace

class Engine {
  public:
    explicit Engine(int threads) : pool_(threads) {}

    bool pin(const int32_t* cpus) { return pool_.pin(cpus); }

    void set_attention(const TmAttention& sizes) { attention_ = std::make_unique<Attention>(sizes); }

    void set_buffers(const TmBuffer* buffers, int count) {
        shapes_.assign(buffers, buffers + count);
        buffers_.assign(static_cast<size_t>(count), Buffer{});
        memory_.clear();
        memory_.resize(static_cast<size_t>(count) * kParts);
        capacity_ = 0;
    }

    void reserve(int64_t rows) {
        if (rows <= capacity_) return;
        capacity_ = 0;  // should memory be lacking on the way, nothing is taken for usable
        rows = (rows + kRowsReserved - 1) / kRowsReserved * kRowsReserved;
        for (size_t i = 0; i < shapes_.size(); i++) {
            const auto width = static_cast<size_t>(shapes_[i].width), n = static_cast<size_t>(rows);
            Memory* parts = &memory_[i * kParts];
            Buffer& buffer = buffers_[i];
            buffer.width = shapes_[i].width;
            buffer.values = static_cast<float*>(parts[0].reserve(n * width * 4));
            if (shapes_[i].codes & TM_CODES16) {
                buffer.codes16 = static_cast<int16_t*>(parts[1].reserve(n * width * 2));
                buffer.scales16 = static_cast<float*>(parts[2].reserve(n * width / kGroup * 8));
            }
            if (shapes_[i].codes & TM_CODES8) {
                buffer.codes8 = static_cast<int8_t*>(parts[3].reserve(n * width));
                buffer.scales8 = static_cast<float*>(parts[4].reserve(n * width / kGroup * 8));
                buffer.outliers = static_cast<Outlier*>(parts[5].reserve(n * kOutliers * sizeof(Outlier)));
            }
        }
        capacity_ = rows;
    }

    float* values(int index, int64_t rows) {
        reserve(rows);
        return buffers_[static_cast<size_t>(index)].values;
    }

    void run(const TmOp* ops, int count, const TmStep& step) {
        reserve(std::max(step.tokens, step.rows));
        if (attention_) attention_->plan(step, pool_.threads());
        for (int i = 0; i < count; i++) run_one(ops[i], step);
    }

    void sample(const TmSampling& sampling) {
        scratch_.resize(static_cast<size_t>(pool_.threads()));
        for (SampleScratch& scratch : scratch_) scratch.reserve(sampling.vocab_size);
        pool_.run(sampling.rows, [&](int64_t row, int thread) {
            sampling.ids[row] = sample_row(sampling, row, scratch_[static_cast<size_t>(thread)]);
        });
    }

  private:
    static constexpr int kParts = 6;

    void run_one(const TmOp& op, const TmStep& step) {
        const auto at = [&](int index) -> const Buffer& { return buffers_[static_cast<size_t>(index)]; };
        const auto* weight = static_cast<const Weight*>(op.weight);
        switch (op.code) {
            case TM_EMBED: return embed(*weight, op.first, step, at(op.out));
            case TM_NORM: return norm(op, step);
            case TM_LINEAR: return linear(op, *weight, step.tokens, at(op.out).values);
            case TM_GATED: return gated(op, *weight, step);
            case TM_ROPE: return attention_->rope_and_write(pool_, step, at(op.in), at(op.out), op.layer);
            case TM_ATTENTION: return attend(op, step);
            case TM_LOGITS:
                if (step.best_ids) return best_ids(op, *weight, step);
                return linear(op, *weight, step.rows, step.logits);
        }
    }

    // body(first row, end row)
    template <class Body>
    void over_rows(int64_t rows, const Body& body) {
        if (rows <= kRowsInline) return body(int64_t{0}, rows);
        pool_.run((rows + kRowsInline - 1) / kRowsInline, [&](int64_t task, int) {
            body(task * kRowsInline, std::min((task + 1) * kRowsInline, rows));
        });
    }

    void embed(const Weight& table, int64_t first_id, const TmStep& step, const Buffer& out) {
        over_rows(step.tokens, [&](int64_t first, int64_t end) {
            for (int64_t t = first; t < end; t++) {
                const int64_t row = step.token_ids[t] - first_id;
                float* to = out.values + t * out.width;
                if (row >= 0 && row < table.n) table.read_row(row, to);
                else std::fill(to, to + out.width, 0.0f);
            }
        });
    }

    void norm(const TmOp& op, const TmStep& step) {
        const bool gathered = op.flags & TM_LOGITS_ROWS;
        const Buffer& residual = buffers_[static_cast<size_t>(op.in2)];
        const Buffer& out = buffers_[static_cast<size_t>(op.out)];
        const float* added = op.in < 0 ? nullptr : buffers_[static_cast<size_t>(op.in)].values;
        const auto* weight = static_cast<const float*>(op.weight);
        const int64_t width = out.width;
        over_rows(gathered ? step.rows : step.tokens, [&](int64_t first, int64_t end) {
            for (int64_t row = first; row < end; row++) {
                const int64_t from = gathered ? step.logits_rows[row] : row;
                norm_row(residual.values + from * width, added ? added + from * width : nullptr, weight, op.eps, !gathered,
                         out, row);
            }
        });
    }

    // Root mean square norm (Zhang & Sennrich 2019) of x + added; with `keep`, x becomes that sum.
    static void norm_row(float* x, const float* added, const float* weight, float eps, bool keep, const Buffer& out,
                         int64_t row) {
        const int64_t width = out.width;
        float* to = out.values + row * width;
        F8 squares = zero8();
        float tail = 0.0f;
        int64_t i = 0;
        for (; i + 8 <= width; i += 8) {
            F8 sum = load8(x + i);
            if (added) sum = sum + load8(added + i);
            if (keep && added) store8(x + i, sum);
            store8(to + i, sum);
            squares = fma(sum, sum, squares);
        }
        for (; i < width; i++) {
            const float sum = added ? x[i] + added[i] : x[i];
            if (keep) x[i] = sum;
            to[i] = sum;
            tail += sum * sum;
        }
        const float mean = (sum8(squares) + tail) / static_cast<float>(width);
        const float scale = 1.0f / std::sqrt(mean + eps);
        for (i = 0; i + 8 <= width; i += 8) store8(to + i, load8(to + i) * set8(scale) * load8(weight + i));
        for (; i < width; i++) to[i] = to[i] * scale * weight[i];
        quantize_row(out, row, to);
    }

    // Row blocks outside, column blocks inside: a thread keeps the inputs of a row block in its cache.
    template <class Body>
    void over_tiles(int64_t rows, int64_t columns, const Body& body) {
        const int64_t column_blocks = (columns + kTileColumns - 1) / kTileColumns;
        const int64_t row_blocks = (rows + kTileRows - 1) / kTileRows;
        // Memory is read ahead of use, for which a thread's next task must be known.
        pool_.run_in_turn(row_blocks * column_blocks, [&](int64_t task, int thread) {
            const int64_t row0 = task / column_blocks * kTileRows, col0 = task % column_blocks * kTileColumns;
            body(row0, static_cast<int>(std::min<int64_t>(kTileRows, rows - row0)), col0,
                 static_cast<int>(std::min<int64_t>(kTileColumns, columns - col0)), thread);
        });
    }

    void linear(const TmOp& op, const Weight& weight, int64_t rows, float* out) {
        const Buffer& in = buffers_[static_cast<size_t>(op.in)];
        const int64_t out_width = weight.n;
        over_tiles(rows, weight.n, [&](int64_t row0, int count, int64_t col0, int cols, int) {
            if (!weight.bias && cols == kTileColumns) {
                multiply_tile(weight, in, row0, count, col0, cols, out + row0 * out_width + col0, out_width);
                return;
            }
            alignas(64) float tile[kTileRows * kTileColumns];
            multiply_tile(weight, in, row0, count, col0, cols, tile, kTileColumns);
            for (int r = 0; r < count; r++) {
                const float* from = tile + r * kTileColumns;
                float* to = out + (row0 + r) * out_width + col0;
                if (weight.bias) {
                    for (int c = 0; c < cols; c++) to[c] = from[c] + weight.bias[col0 + c];
                } else {
                    std::copy(from, from + cols, to);
                }
            }
        });
    }

    // The logits are looked at where they are computed, and kept nowhere.
    void best_ids(const TmOp& op, const Weight& weight, const TmStep& step) {
        const Buffer& in = buffers_[static_cast<size_t>(op.in)];
        const auto rows = static_cast<size_t>(step.rows);
        best_.assign(rows * static_cast<size_t>(pool_.threads()), Best{});
        over_tiles(step.rows, weight.n, [&](int64_t row0, int count, int64_t col0, int cols, int thread) {
            alignas(64) float tile[kTileRows * kTileColumns];
            multiply_tile(weight, in, row0, count, col0, cols, tile, kTileColumns);
            Best* best = &best_[static_cast<size_t>(thread) * rows + static_cast<size_t>(row0)];
            for (int r = 0; r < count; r++) {
                float* row = tile + r * kTileColumns;
                for (int c = 0; weight.bias && c < cols; c++) row[c] += weight.bias[col0 + c];
                best[r].look_at(row, col0, cols);
            }
        });
        for (size_t row = 0; row < rows; row++) {
            Best best;
            for (size_t at = row; at < best_.size(); at += rows) best.merge(best_[at]);
            step.best_ids[row] = best.nan ? -1 : best.id;
        }
    }

    void gated(const TmOp& op, const Weight& weight, const TmStep& step) {
        const Buffer& in = buffers_[static_cast<size_t>(op.in)];
        const Buffer& out = buffers_[static_cast<size_t>(op.out)];
        const bool gelu = op.flags & TM_GELU;
        constexpr int kPair = 2 * kTileColumns;
        over_tiles(step.tokens, out.width, [&](int64_t row0, int count, int64_t col0, int cols, int) {
            alignas(64) float tile[kTileRows * kPair];
            multiply_tile(weight, in, row0, count, 2 * col0, kPair, tile, kPair);
            for (int r = 0; r < count; r++) {
                float* row = tile + r * kPair;
                if (weight.bias) {
                    for (int c = 0; c < kPair; c++) row[c] += weight.bias[2 * col0 + c];
                }
                alignas(32) float result[kTileColumns];
                gate_row(row, row + kTileColumns, kTileColumns, gelu, result);
                const int64_t at = (row0 + r) * out.width + col0;
                std::copy(result, result + cols, out.values + at);
            }
        });
        quantize(out, step.tokens);
    }

    void attend(const TmOp& op, const TmStep& step) {
        const Buffer& out = buffers_[static_cast<size_t>(op.out)];
        attention_->attend(pool_, step, buffers_[static_cast<size_t>(op.in)], out, op.layer, op.window);
        quantize(out, step.tokens);
    }

    void quantize(const Buffer& out, int64_t rows) {
        if (out.codes16 == nullptr && out.codes8 == nullptr) return;
        over_rows(rows, [&](int64_t first, int64_t end) {
            for (int64_t row = first; row < end; row++) quantize_row(out, row, out.values + row * out.width);
        });
    }

    Pool pool_;
    std::unique_ptr<Attention> attention_;
    std::vector<TmBuffer> shapes_;
    std::vector<Buffer> buffers_;
    std::vector<Memory> memory_;
    std::vector<Best> best_;  // [threads, rows]
    std::vector<SampleScratch> scratch_;  // one a thread
    int64_t capacity_ = 0;
};

}  // namespace tokenmill

using tokenmill::Engine;
using tokenmill::Weight;

#define TM_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

template <class Body>
int32_t guarded(const Body& body) {
    try {
        body();
        return 0;
    } catch (const std::exception&) {
        return -1;
    }
}

template <class Body>
void* made(const Body& body) {
    try {
        return body();
    } catch (const std::exception&) {
        return nullptr;
    }
}

Engine& engine_of(void* engine) { return *static_cast<Engine*>(engine); }
Weight& weight_of(void* weight) { return *static_cast<Weight*>(weight); }

}  // namespace

TM_EXPORT void* tm_engine_new(int32_t threads) {
    return made([&] { return new Engine(threads); });
}

TM_EXPORT int32_t tm_engine_pin(void* engine, const int32_t* cpus) { return engine_of(engine).pin(cpus) ? 0 : -1; }

TM_EXPORT void tm_engine_free(void* engine) { delete static_cast<Engine*>(engine); }

TM_EXPORT int64_t tm_kv_block_bytes(const TmAttention* sizes) { return tokenmill::KvLayout(*sizes).block_bytes; }

TM_EXPORT int32_t tm_engine_set_attention(void* engine, const TmAttention* sizes) {
    return guarded([&] { engine_of(engine).set_attention(*sizes); });
}

TM_EXPORT int32_t tm_engine_set_buffers(void* engine, const TmBuffer* buffers, int32_t count) {
    return guarded([&] { engine_of(engine).set_buffers(buffers, count); });
}

TM_EXPORT int32_t tm_engine_run(void* engine, const TmOp* ops, int32_t count, const TmStep* step) {
    return guarded([&] { engine_of(engine).run(ops, count, *step); });
}

TM_EXPORT int32_t tm_engine_sample(void* engine, const TmSampling* sampling) {
    return guarded([&] { engine_of(engine).sample(*sampling); });
}

TM_EXPORT void* tm_engine_values(void* engine, int32_t index, int64_t rows) {
    return made([&] { return engine_of(engine).values(index, rows); });
}

TM_EXPORT void* tm_weight_new(int32_t kind, int64_t n, int64_t k) {
    return made([&] { return new Weight(static_cast<tokenmill::Kind>(kind), n, k); });
}

TM_EXPORT void tm_weight_free(void* weight) { delete static_cast<Weight*>(weight); }

TM_EXPORT int64_t tm_weight_bytes(const void* weight) {
    const auto* w = static_cast<const Weight*>(weight);
    return w->panels() * w->panel_bytes();
}

TM_EXPORT void tm_weight_pack_float(void* weight, const float* source) { weight_of(weight).pack_float(source); }

TM_EXPORT void tm_weight_pack_int4(void* weight, const uint8_t* codes, const float* scales, const float* minimums) {
    weight_of(weight).pack_int4(codes, scales, minimums);
}

TM_EXPORT void tm_weight_pack_int8(void* weight, const int8_t* codes, const float* scales) {
    weight_of(weight).pack_int8(codes, scales);
}

TM_EXPORT int32_t tm_weight_set_bias(void* weight, const float* bias) {
    return guarded([&] {
        Weight& w = weight_of(weight);
        w.bias.reset(new float[static_cast<size_t>(w.n)]);
        std::copy(bias, bias + w.n, w.bias.get());
    });
}
