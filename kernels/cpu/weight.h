// Packed weights and the buffers that products read and write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "vectors.h"

namespace tokenmill {

enum class Kind : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt4 = 2, kInt8 = 3 };

constexpr int kGroup = 32;  // consecutive inputs that share a scale, of quantized weights and activations

// Columns (output features) of a panel: those of two vectors of float sums, or of one of integer sums. One load has what
// one instruction wants, so the layout differs between instruction sets; it is never stored.
constexpr int kFloatColumns = 2 * kLanes;
inline int panel_width(Kind kind) {
    return kind == Kind::kFloat32 || kind == Kind::kBfloat16 ? kFloatColumns : kLanes;
}

// One panel of one group of an int4 weight: value = code * scale + minimum, scales as IEEE half floats.
// codes[j][4 c + i], low four bits: column c, input 4 j + i; high four bits: input 4 (j + 4) + i.
struct Int4Group {
    Half scale[kLanes];
    Half minimum[kLanes];
    uint8_t codes[4][4 * kLanes];
};
static_assert(sizeof(Int4Group) == 20 * kLanes);

// Likewise of an int8 weight, codes -128..127: value = code * scale; codes[j][4 c + i]: column c, input 4 j + i.
struct Int8Group {
    Half scale[kLanes];
    int8_t codes[8][4 * kLanes];
};
static_assert(sizeof(Int8Group) == 34 * kLanes);

// An [N, K] weight, panel after panel, each panel input after input. Of an input, a float32 panel has two vectors, a
// bfloat16 panel one vector of pairs (column i in the lower half, column kLanes + i in the upper).
struct Weight {
    Kind kind;
    int64_t n;
    int64_t k;
    std::unique_ptr<float[]> bias;  // [N], or none
    unsigned char* data = nullptr;

    Weight(Kind kind, int64_t n, int64_t k);
    Weight(const Weight&) = delete;
    Weight& operator=(const Weight&) = delete;

    int64_t panels() const { return (n + panel_width(kind) - 1) / panel_width(kind); }
    int64_t panel_bytes() const;
    const unsigned char* panel(int64_t index) const { return data + index * panel_bytes(); }

    void pack_float(const float* source);
    // codes [N, K]; scales and minimums [N, K / 32] (no minimums: nullptr)
    void pack_int4(const uint8_t* codes, const float* scales, const float* minimums);
    void pack_int8(const int8_t* codes, const float* scales);

    // Row `index` of the [N, K] weight, as float32 [K].
    void read_row(int64_t index, float* out) const;

  private:
    std::shared_ptr<unsigned char> memory_;
};

// One value of a row that is left out of its int8 codes: where an Int4Group has the codes that it meets.
struct Outlier {
    int32_t group;
    int16_t row;    // of codes
    int16_t shift;  // bits of 32, in which a column has four bytes of that row
    float value;
};

constexpr int kOutliers = 4;  // of each row, the largest

// Rows of activations, of `width` elements each. Codes may be absent.
struct Buffer {
    int64_t width = 0;
    float* values = nullptr;  // [rows, width]
    // For int8 weights: value = code * scale of its group; of every four codes the first, third, second and fourth.
    int16_t* codes16 = nullptr;  // [rows, width]
    float* scales16 = nullptr;   // [rows, width / 32, 2]: of each group its scale, and scale * sum of its codes
    // For int4 weights: likewise, in order, without the outliers: their codes are 0, their values in the sums of groups.
    int8_t* codes8 = nullptr;
    float* scales8 = nullptr;
    Outlier* outliers = nullptr;  // [rows, 4]
};

// Symmetric: scale = largest / 32767 of each 32, or largest / 127.
void quantize16(const float* x, int64_t width, int16_t* codes, float* scales);
void quantize8(const float* x, int64_t width, int8_t* codes, float* scales, Outlier* outliers);

// The forms that `out` has, of the row `x`.
inline void quantize_row(const Buffer& out, int64_t row, const float* x) {
    const int64_t at = row * out.width, scales_at = row * (out.width / kGroup) * 2;
    if (out.codes16) quantize16(x, out.width, out.codes16 + at, out.scales16 + scales_at);
    if (out.codes8) quantize8(x, out.width, out.codes8 + at, out.scales8 + scales_at, out.outliers + row * kOutliers);
}

// tile[r * stride + c] = row `row0 + r` of x times column `col0 + c` of the weight, without bias.
// col0 is a multiple of 32; columns up to the end of the last panel are written.
// Quantized weights take the codes of x, float weights its values.
// Every result is computed by the same operations in the same order whatever `rows` and the tile are.
void multiply_tile(const Weight& weight, const Buffer& x, int64_t row0, int rows, int64_t col0, int cols, float* tile,
                   int64_t stride);

}  // namespace tokenmill
