/* Products of few rows of activations with matrices as they lie in memory. Each thread reads a part that is contiguous,
 * once for all rows, and asks for it in time, so that memory delivers as fast as it can. But for nf4, what a row gives is
 * bit for bit the same in any company. */

#include "steps.h"

typedef struct {
    const void *numbers; /* as `form` says */
    const void *scales;  /* of bytes float[rows], of nf4 bfloat16[columns / BLOCK][rows] */
    const float *bias;   /* [rows], or none */
    int64_t rows, columns;
    int64_t form;
} matrix;

typedef struct {
    float *numbers;        /* [columns], one row of activations */
    const char *lines[2];  /* what it makes of them for a form, the other one of bytes alone */
    void *prepared;        /* room for that: bfloat16, 16 even and 16 odd numbers in turn, or lower and higher bytes */
    float step;            /* what a whole number is worth */
} input;

static inline float half_to_float(uint16_t half) {
    union { uint32_t word; float number; } both = {(uint32_t)half << 16};
    return both.number;
}

static inline uint16_t float_to_half(float number) {
    union { float number; uint32_t word; } both = {number};
    if (number != number) return 0x7fc0;
    return (uint16_t)((both.word + 0x7fff + ((both.word >> 16) & 1)) >> 16);
}

static void widen(const void *from, int halves, int64_t count, float *to) {
    if (!halves) {
        memcpy(to, from, (size_t)count * sizeof(float));
        return;
    }
    const uint16_t *numbers = from;
    for (int64_t i = 0; i < count; i++) to[i] = half_to_float(numbers[i]);
}

static void narrow(const float *from, int halves, int64_t count, void *to) {
    if (!halves) {
        memcpy(to, from, (size_t)count * sizeof(float));
        return;
    }
    uint16_t *numbers = to;
    for (int64_t i = 0; i < count; i++) numbers[i] = float_to_half(from[i]);
}

static inline float sum_of(floats vector) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += vector[i];
    return sum;
}

/* Fills what matrices of this form need beside in->numbers. */
static void prepare(int64_t form, int64_t columns, input *in) {
    in->lines[0] = (const char *)in->numbers;
    if (form == FLOAT_PANELS || form == FLOAT_ROWS) return;
#if HAS_PRODUCTS_OF_HALVES
    if (form != BYTE_PANELS) narrow(in->numbers, 1, columns, in->prepared);
#else
    if (form == HALF_PANELS) return;
    if (form == HALF_ROWS)
        for (int64_t k = 0; k < columns / 2; k++) {
            float *at = (float *)in->prepared + k / LANES * 2 * LANES + k % LANES;
            at[0] = in->numbers[2 * k];
            at[LANES] = in->numbers[2 * k + 1];
        }
#endif
    in->lines[0] = in->prepared;
    if (form != BYTE_PANELS) return;
    uint8_t *lower = in->prepared, *higher = lower + columns;
    in->lines[1] = (const char *)higher;
    float largest = 0;
    for (int64_t k = 0; k < columns; k++) largest = fmaxf(largest, fabsf(in->numbers[k]));
    in->step = largest / LARGEST;
    float step = fmaxf(in->step, 1.17549435e-38f);
    for (int64_t k = 0; k < columns; k++) {
        uint32_t number = (uint32_t)((int32_t)rintf(in->numbers[k] / step) + CENTRES);
        lower[k] = (uint8_t)number;
        higher[k] = (uint8_t)(number >> 8);
    }
}

/* The lines of prepared inputs, and behind them the last one again; how many there are. */
static int64_t lines_of(int64_t form, const input *in, int64_t rows, const char **lines) {
    int64_t count = 0;
    for (int64_t r = 0; r < rows; r++) {
        lines[count++] = in[r].lines[0];
        if (form == BYTE_PANELS) lines[count++] = in[r].lines[1];
    }
    for (int64_t i = 0; i < TOGETHER; i++) lines[count + i] = lines[count - 1];
    return count;
}

#if HAS_VECTORS_OF_BYTES
/* What the sums of a panel's bytes mean, of one row. */
static void finish_bytes(const matrix *m, int64_t row, const input *in, const floats *sums, float *result) {
    const int32_t *minus_sums = (const int32_t *)((const char *)m->numbers + m->rows * m->columns) + row;
    for (int j = 0; j < 4; j++) {
        const __m512i centre = _mm512_slli_epi32(_mm512_loadu_si512(minus_sums + LANES * j), 7);
        const __m512 scale = _mm512_loadu_ps((const float *)m->scales + row + LANES * j);
        const __m512i lower = _mm512_add_epi32((__m512i)sums[j], centre);
        const __m512i higher = _mm512_add_epi32((__m512i)sums[4 + j], centre);
        const __m512 lows = _mm512_mul_ps(_mm512_cvtepi32_ps(lower), scale);
        const __m512 highs = _mm512_mul_ps(_mm512_cvtepi32_ps(higher), scale);
        const __m512 both = _mm512_fmadd_ps(highs, _mm512_set1_ps(256.0f), lows);
        _mm512_storeu_ps(result + LANES * j, _mm512_mul_ps(both, _mm512_set1_ps(in->step)));
    }
}
#endif

/* The sums of so many lines, and of some that fill them up. */
static inline void clear(floats *sums, int64_t count) {
    memset(sums, 0, (size_t)(count > 1 ? count + 3 : 1) * 4 * sizeof(floats));
}

/* A panel of UNIT outputs from `row` on, of each line [lines][4]; of a matrix as torch keeps it four outputs, whose sums
 * are those of the four vectors' numbers. */
static void panel_sums(const matrix *m, int64_t row, const char *const *lines, int64_t count, floats *sums) {
    const int in_rows = IN_ROWS(m->form);
    const int64_t steps = m->columns / STEP_COLUMNS(m->form), bytes = in_rows ? 64 : STEP_BYTES(m->form);
    const char *weights = (const char *)m->numbers + (in_rows ? row : row / UNIT) * bytes * steps;
    clear(sums, count);
    for (int64_t first = 0; first < steps; first += STEPS) {
        const int64_t here = steps - first < STEPS ? steps - first : STEPS;
        const stretch at = {weights + first * bytes, first, here, bytes * steps, STEPS * bytes, 0, 0};
        add_all(m->form, count, at, lines, sums);
    }
}

#if HAS_PRODUCTS_OF_HALVES
/* The same of nf4, two panels. */
static void nf4_sums(const matrix *m, int64_t row, const char *const *lines, int64_t count, floats *sums) {
    const int64_t steps = m->columns / STEP_COLUMNS(NF4_PANELS);
    const char *weights = (const char *)m->numbers + row * steps;
    const uint16_t *scales = (const uint16_t *)m->scales + row;
    floats parts[4 * MOST_LINES];
    clear(sums, count);
    for (int64_t first = 0; first < steps; first += STEPS, scales += m->rows)
        for (int panel = 0; panel < 2; panel++) {
            const stretch at = {weights + (panel * steps + first) * PANEL, first, STEPS, 0, AHEAD, 0, 0};
            const floats upper = widened(scales + panel * PANEL), lower = widened(scales + panel * PANEL + LANES);
            clear(parts, count);
            add_all(NF4_PANELS, count, at, lines, parts);
            for (int64_t l = 0; l < count; l++) {
                sums[4 * l + 2 * panel] += parts[4 * l] * upper;
                sums[4 * l + 2 * panel + 1] += parts[4 * l + 1] * lower;
            }
        }
}

/* The same for a single line: with so few sums each is divided, so that none waits for the one before. */
static void nf4_panels(const matrix *m, int64_t row, const char *line, floats *sums) {
    const __m512i table = _mm512_loadu_si512(NORMAL_FLOATS);
    const char *weights = (const char *)m->numbers + row * m->columns / 2;
    for (int panel = 0; panel < 2; panel++) {
        const uint16_t *scales = (const uint16_t *)m->scales + row + panel * PANEL;
        floats upper = {0}, lower = {0};
        for (int64_t first = 0; first < m->columns / 2; first += STEPS, scales += m->rows) {
            floats uppers[4] = {0}, lowers[4] = {0}, halves[2];
            for (int64_t step = first; step < first + STEPS; step += 4, weights += 4 * PANEL) {
                __builtin_prefetch(weights + AHEAD);
                __builtin_prefetch(weights + AHEAD + 64);
                for (int j = 0; j < 4; j++) {
                    unpack(weights + PANEL * j, table, halves);
                    uppers[j] = added(NF4_PANELS, uppers[j], halves[0], line, step + j);
                    lowers[j] = added(NF4_PANELS, lowers[j], halves[1], line, step + j);
                }
            }
            upper += ((uppers[0] + uppers[1]) + (uppers[2] + uppers[3])) * widened(scales);
            lower += ((lowers[0] + lowers[1]) + (lowers[2] + lowers[3])) * widened(scales + LANES);
        }
        sums[2 * panel] = upper;
        sums[2 * panel + 1] = lower;
    }
}
#endif

/* Outputs [first, last) of the prepared inputs times the transposed matrix, each row's `stride` behind the one before;
 * both ends are multiples of UNIT. */
static void multiply(const matrix *m, const input *in, int64_t rows, int64_t first, int64_t last, float *result,
                     int64_t stride) {
    const char *lines[MOST_LINES];
    floats sums[4 * MOST_LINES];
    const int64_t count = lines_of(m->form, in, rows, lines);
    for (int64_t row = first; row < last; row += UNIT, result += UNIT) {
        switch (m->form) {
        case FLOAT_ROWS:
        case HALF_ROWS:
            for (int64_t i = 0; i < UNIT; i += 4) {
                panel_sums(m, row + i, lines, count, sums);
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t j = 0; j < 4; j++) result[r * stride + i + j] = sum_of(sums[4 * r + j]);
            }
            break;
#if HAS_PRODUCTS_OF_HALVES
        case NF4_PANELS:
            if (rows == 1)
                nf4_panels(m, row, lines[0], sums);
            else
                nf4_sums(m, row, lines, count, sums);
            for (int64_t r = 0; r < rows; r++) memcpy(result + r * stride, sums + 4 * r, UNIT * sizeof(float));
            break;
#endif
#if HAS_VECTORS_OF_BYTES
        case BYTE_PANELS:
            panel_sums(m, row, lines, count, sums);
            for (int64_t r = 0; r < rows; r++) finish_bytes(m, row, in + r, sums + 8 * r, result + r * stride);
            break;
#endif
        default:
            panel_sums(m, row, lines, count, sums);
            for (int64_t r = 0; r < rows; r++) memcpy(result + r * stride, sums + 4 * r, UNIT * sizeof(float));
        }
        if (m->bias)
            for (int64_t r = 0; r < rows; r++)
                for (int64_t i = 0; i < UNIT; i++) result[r * stride + i] += m->bias[row + i];
    }
}

/* Where the part of a thread begins, of so many rows of a matrix. */
static inline int64_t part_of(int64_t rows, int64_t thread, int64_t threads) {
    return rows / UNIT * thread / threads * UNIT;
}

/* Floats of scratch for an input of so many numbers: neighbours' do not fall into the same sets of a cache. */
static inline int64_t scratch_floats(int64_t most) { return 2 * most + APART; }

/* The inputs with their parts in the scratch, which has room for as many times `scratch_floats`. */
static void inputs_in(float *scratch, int64_t most, int64_t rows, input *in) {
    for (int64_t r = 0; r < rows; r++, scratch += scratch_floats(most))
        in[r] = (input){scratch, {NULL, NULL}, scratch + most, 0};
}
