/* Resize RGB images to planes, equal to Pillow's `resize` to the last bit, in a fraction of its time. Optional: without
   a compiler, or where a check finds a difference, Pillow does it (forebay/images/resize.py).

   Pillow resizes each line with integer weights of 22 bits, rounds to bytes, and does the same for each column. A weight
   is split here into two halves that fit into 16 bits, so that one instruction multiplies 16 bytes and adds them in pairs:

       weight = high · 2^11 + low        sum of byte · weight = (sum of byte · high) · 2^11 + sum of byte · low

   Both sums are exact in 32 bits. Pixels have four bytes, of which the fourth is not used. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>
#define HAS_AVX2 1
#define AVX2 __attribute__((target("avx2")))
#endif

enum { PRECISION = 22, LOW = 11, HALF = 1 << (PRECISION - 1), BYTES = 4, GROUP = 4, MOST_SIDE = 1 << 16 };

/* The part of the Arrow C data interface that is read: Pillow lends its pixels by it, without a copy. */
struct ArrowArray {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers;
    struct ArrowArray **children;
    struct ArrowArray *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};

/* Weights of one axis: new pixel i is the sum of old pixels first[i] … first[i] + taps[i] - 1, weighted. */
typedef struct {
    int length, count, most; /* old pixels, new pixels, the most that are summed for one */
    int *first, *taps;
    int32_t *weights; /* [count][most] */
    int16_t *pairs;   /* [count][groups][2][16]: halves of weights as the vector loop across multiplies them */
    int *starts;      /* where its groups of four pixels begin: their zeros, too, lie inside the line */
    int groups;
} Axis;

static double triangle(double x) {
    x = fabs(x);
    return x < 1.0 ? 1.0 - x : 0.0;
}

static double cubic(double x) {
    const double a = -0.5;
    x = fabs(x);
    if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
    if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
    return 0.0;
}

static double sinc(double x) {
    if (x == 0.0) return 1.0;
    x = x * M_PI;
    return sin(x) / x;
}

static double lanczos(double x) { return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0; }

typedef struct {
    double (*weight)(double);
    double support;
} Kernel;

static const Kernel KERNELS[] = {{triangle, 1.0}, {cubic, 2.0}, {lanczos, 3.0}};

static void free_axis(Axis *axis) {
    free(axis->first);
    free(axis->weights);
    free(axis->pairs);
}

/* Weights for whole groups of pixels, filled up with zeros at the end, or before it where the line ends. */
static int group_weights(Axis *axis) {
    axis->groups = (axis->most + GROUP - 1) / GROUP;
    int taps = axis->groups * GROUP;
    axis->pairs = calloc((size_t)axis->count * taps * 8, sizeof(int16_t));
    if (!axis->pairs) return -1;
    for (int at = 0; at < axis->count; at++) {
        int first = axis->first[at], start = first + taps <= axis->length ? first : axis->length - taps;
        axis->starts[at] = start;
        for (int tap = first - start; tap < first - start + axis->taps[at]; tap++) {
            int32_t weight = axis->weights[(size_t)at * axis->most + tap - (first - start)];
            int16_t *group = axis->pairs + ((size_t)at * axis->groups + tap / GROUP) * 32;
            int place = (tap % GROUP / 2) * 8 + tap % 2; /* taps 0 and 1 in the lower half, 2 and 3 in the upper */
            for (int band = 0; band < BYTES; band++) {
                group[place + 2 * band] = (int16_t)(weight >> LOW);
                group[16 + place + 2 * band] = (int16_t)(weight & ((1 << LOW) - 1));
            }
        }
    }
    return 0;
}

/* The weights as Pillow computes them, operation by operation. -1: no memory. */
static int make_axis(Axis *axis, int length, int count, Kernel kernel) {
    double scale = (double)length / count, wide = scale < 1.0 ? 1.0 : scale, support = kernel.support * wide;
    axis->length = length;
    axis->count = count;
    axis->first = malloc((size_t)count * 3 * sizeof(int));
    if (!axis->first) return -1;
    axis->taps = axis->first + count;
    axis->starts = axis->taps + count;
    for (int at = 0; at < count; at++) {
        double center = (at + 0.5) * scale;
        int first = (int)(center - support + 0.5), last = (int)(center + support + 0.5);
        axis->first[at] = first < 0 ? 0 : first;
        axis->taps[at] = (last > length ? length : last) - axis->first[at];
        if (axis->taps[at] > axis->most) axis->most = axis->taps[at];
    }
    axis->weights = malloc((size_t)count * axis->most * sizeof(int32_t));
    double *exact = malloc(axis->most * sizeof(double)), unit = 1.0 / wide;
    if (!axis->weights || !exact) {
        free(exact);
        return -1;
    }
    for (int at = 0; at < count; at++) {
        double center = (at + 0.5) * scale, sum = 0.0;
        for (int tap = 0; tap < axis->taps[at]; tap++) {
            exact[tap] = kernel.weight((tap + axis->first[at] - center + 0.5) * unit);
            sum += exact[tap];
        }
        for (int tap = 0; tap < axis->taps[at]; tap++) {
            double weight = (sum != 0.0 ? exact[tap] / sum : exact[tap]) * (1 << PRECISION);
            axis->weights[(size_t)at * axis->most + tap] = (int)(weight < 0 ? weight - 0.5 : weight + 0.5);
        }
    }
    free(exact);
    return 0;
}

static uint8_t as_byte(int32_t sum) {
    sum >>= PRECISION;
    return sum < 0 ? 0 : sum > 255 ? 255 : (uint8_t)sum;
}

static void across_plain(uint8_t *out, const uint8_t *line, const Axis *axis) {
    for (int at = 0; at < axis->count; at++) {
        const int32_t *weights = axis->weights + (size_t)at * axis->most;
        const uint8_t *pixels = line + (size_t)axis->first[at] * BYTES;
        int32_t sums[BYTES] = {HALF, HALF, HALF, HALF};
        for (int tap = 0; tap < axis->taps[at]; tap++)
            for (int band = 0; band < BYTES; band++) sums[band] += pixels[tap * BYTES + band] * weights[tap];
        for (int band = 0; band < BYTES; band++) out[at * BYTES + band] = as_byte(sums[band]);
    }
}

/* One new line: weighted old lines. */
static void down_plain(uint8_t *out, const uint8_t *const *lines, size_t width, int taps, const int32_t *weights) {
    for (size_t at = 0; at < width; at++) {
        int32_t sum = HALF;
        for (int tap = 0; tap < taps; tap++) sum += lines[tap][at] * weights[tap];
        out[at] = as_byte(sum);
    }
}

#ifdef HAS_AVX2
AVX2 static inline __m128i rounded(__m256i high, __m256i low) {
    __m256i both = _mm256_add_epi32(_mm256_slli_epi32(high, LOW), low);
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    return _mm_srai_epi32(_mm_add_epi32(sum, _mm_set1_epi32(HALF)), PRECISION);
}

/* Up to four lines at once: the weights are loaded once for all of them. */
AVX2 static void across_avx2(uint8_t *out, size_t out_stride, const uint8_t *in, size_t in_stride, int lines, const Axis *axis) {
    const __m128i pairs = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    int groups = axis->groups;
    for (int at = 0; at < axis->count; at++) {
        const int16_t *weights = axis->pairs + (size_t)at * groups * 32;
        const uint8_t *pixels = in + (size_t)axis->starts[at] * BYTES;
        __m256i high[4], low[4];
        for (int line = 0; line < 4; line++) high[line] = low[line] = _mm256_setzero_si256();
        for (int group = 0; group < groups; group++) {
            __m256i upper = _mm256_loadu_si256((const __m256i *)(weights + group * 32));
            __m256i lower = _mm256_loadu_si256((const __m256i *)(weights + group * 32 + 16));
            for (int line = 0; line < 4; line++) {
                const uint8_t *four = pixels + (line < lines ? line : 0) * in_stride + group * GROUP * BYTES;
                __m128i loaded = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)four), pairs);
                __m256i wide = _mm256_cvtepu8_epi16(loaded);
                high[line] = _mm256_add_epi32(high[line], _mm256_madd_epi16(wide, upper));
                low[line] = _mm256_add_epi32(low[line], _mm256_madd_epi16(wide, lower));
            }
        }
        __m128i first = _mm_packs_epi32(rounded(high[0], low[0]), rounded(high[1], low[1]));
        __m128i second = _mm_packs_epi32(rounded(high[2], low[2]), rounded(high[3], low[3]));
        uint32_t bytes[4];
        _mm_storeu_si128((__m128i *)bytes, _mm_packus_epi16(first, second));
        for (int line = 0; line < lines; line++) memcpy(out + line * out_stride + at * BYTES, &bytes[line], BYTES);
    }
}

AVX2 static void down_avx2(uint8_t *out, const uint8_t *const *lines, size_t width, int taps, const int32_t *weights) {
    for (size_t begin = 0; begin < width; begin += 16) {
        size_t at = begin + 16 <= width ? begin : width - 16; /* the last block may overlap the one before */
        __m256i high[2], low[2];
        for (int half = 0; half < 2; half++) high[half] = low[half] = _mm256_setzero_si256();
        for (int tap = 0; tap < taps; tap += 2) {
            int second = tap + 1 < taps ? weights[tap + 1] : 0;
            const uint8_t *above = lines[tap] + at, *below = lines[tap + (tap + 1 < taps)] + at;
            __m128i one = _mm_loadu_si128((const __m128i *)above), two = _mm_loadu_si128((const __m128i *)below);
            uint32_t uppers = (uint16_t)(weights[tap] >> LOW) | (uint32_t)(uint16_t)(second >> LOW) << 16;
            uint32_t lowers = (weights[tap] & ((1 << LOW) - 1)) | (uint32_t)(second & ((1 << LOW) - 1)) << 16;
            __m256i upper = _mm256_set1_epi32((int)uppers), lower = _mm256_set1_epi32((int)lowers);
            __m256i wide[2] = {_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(one, two)), _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(one, two))};
            for (int half = 0; half < 2; half++) {
                high[half] = _mm256_add_epi32(high[half], _mm256_madd_epi16(wide[half], upper));
                low[half] = _mm256_add_epi32(low[half], _mm256_madd_epi16(wide[half], lower));
            }
        }
        __m256i sums[2];
        for (int half = 0; half < 2; half++) {
            sums[half] = _mm256_add_epi32(_mm256_add_epi32(_mm256_slli_epi32(high[half], LOW), low[half]), _mm256_set1_epi32(HALF));
            sums[half] = _mm256_srai_epi32(sums[half], PRECISION);
        }
        __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(sums[0], sums[1]), 0xD8);
        __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128((__m128i *)(out + at), bytes);
    }
}

AVX2 static size_t planes_avx2(uint8_t *out, size_t plane, const uint8_t *pixels, size_t count) {
    const __m128i bands = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    size_t at = 0;
    for (; at + 8 <= count; at += 8) {
        __m256i eight = _mm256_loadu_si256((const __m256i *)(pixels + at * BYTES));
        eight = _mm256_shuffle_epi8(eight, _mm256_broadcastsi128_si256(bands));
        eight = _mm256_permutevar8x32_epi32(eight, order); /* eight bytes of each band */
        uint64_t each[4];
        _mm256_storeu_si256((__m256i *)each, eight);
        for (int band = 0; band < 3; band++) memcpy(out + band * plane + at, &each[band], 8);
    }
    return at;
}

static int has_avx2(void) { return __builtin_cpu_supports("avx2"); }
#else
static int has_avx2(void) { return 0; }
static void across_avx2(uint8_t *o, size_t a, const uint8_t *i, size_t b, int l, const Axis *x) {}
static void down_avx2(uint8_t *o, const uint8_t *const *l, size_t w, int t, const int32_t *k) {}
static size_t planes_avx2(uint8_t *o, size_t n, const uint8_t *p, size_t c) { return 0; }
#endif

typedef struct {
    int width, height;
} Size;

enum { LINES = 4 }; /* resized across at once */

typedef struct {
    const uint8_t *pixels;
    uint8_t *out;
    Size from, to;
    Axis columns, rows; /* an axis that keeps its length has no weights, and nothing is done along it */
    uint8_t *ring;      /* lines between the two steps */
    int room, ready;    /* how many it has, and how many were made so far */
    const uint8_t **lines;
    int fast;
} Work;

static const uint8_t *old_line(const Work *work, int line) { return work->pixels + (size_t)line * work->from.width * BYTES; }

static void across(const Work *work, uint8_t *out, const uint8_t *in, int lines) {
    size_t wide = (size_t)work->from.width * BYTES, narrow = (size_t)work->to.width * BYTES;
    if (work->fast && work->from.width >= work->columns.groups * GROUP)
        across_avx2(out, narrow, in, wide, lines, &work->columns);
    else
        for (int line = 0; line < lines; line++) across_plain(out + line * narrow, in + line * wide, &work->columns);
}

static void down(const Work *work, uint8_t *out, int at, size_t width) {
    const int32_t *weights = work->rows.weights + (size_t)at * work->rows.most;
    if (work->fast && width >= 16)
        down_avx2(out, work->lines, width, work->rows.taps[at], weights);
    else
        down_plain(out, work->lines, width, work->rows.taps[at], weights);
}

static void as_planes(const Work *work, int line, const uint8_t *pixels) {
    size_t plane = (size_t)work->to.width * work->to.height, count = (size_t)work->to.width;
    uint8_t *out = work->out + line * count;
    for (size_t at = work->fast ? planes_avx2(out, plane, pixels, count) : 0; at < count; at++)
        for (int band = 0; band < 3; band++) out[band * plane + at] = pixels[at * BYTES + band];
}

/* A line after the first step. Four are made at a time; the ring keeps as many as a new line is made of. */
static const uint8_t *narrow_line(Work *work, int line) {
    if (!work->columns.weights) return old_line(work, line);
    size_t narrow = (size_t)work->to.width * BYTES;
    while (work->ready <= line) {
        int left = work->from.height - work->ready, lines = left < LINES ? left : LINES;
        across(work, work->ring + (work->ready % work->room) * narrow, old_line(work, work->ready), lines);
        work->ready += lines;
    }
    return work->ring + (line % work->room) * narrow;
}

static void across_then_down(Work *work, uint8_t *made) {
    for (int at = 0; at < work->to.height; at++) {
        if (!work->rows.weights) {
            as_planes(work, at, narrow_line(work, at));
            continue;
        }
        for (int tap = 0; tap < work->rows.taps[at]; tap++) work->lines[tap] = narrow_line(work, work->rows.first[at] + tap);
        down(work, made, at, (size_t)work->to.width * BYTES);
        as_planes(work, at, made);
    }
}

static void down_then_across(Work *work, uint8_t *made) {
    size_t wide = (size_t)work->from.width * BYTES, narrow = (size_t)work->to.width * BYTES;
    for (int begin = 0; begin < work->to.height; begin += LINES) {
        int lines = work->to.height - begin < LINES ? work->to.height - begin : LINES;
        for (int line = 0; line < lines; line++) {
            int at = begin + line;
            for (int tap = 0; tap < work->rows.taps[at]; tap++) work->lines[tap] = old_line(work, work->rows.first[at] + tap);
            down(work, made + line * wide, at, wide);
        }
        if (work->columns.weights) across(work, work->ring, made, lines);
        for (int line = 0; line < lines; line++)
            as_planes(work, begin + line, work->columns.weights ? work->ring + line * narrow : made + line * wide);
    }
}

/* 0, or -1 where there is no memory. */
static int resize(Work *work, Kernel kernel, int down_first) {
    Size from = work->from, to = work->to;
    uint8_t *made = NULL;
    int done = -1;
    if (from.width != to.width && (make_axis(&work->columns, from.width, to.width, kernel) < 0 || group_weights(&work->columns) < 0))
        goto end;
    if (from.height != to.height && make_axis(&work->rows, from.height, to.height, kernel) < 0) goto end;
    int taps = work->rows.most ? work->rows.most : 1;
    work->room = (taps + 2 * LINES + LINES - 1) / LINES * LINES;
    work->ring = malloc((size_t)work->room * to.width * BYTES);
    work->lines = malloc(taps * sizeof(uint8_t *));
    made = malloc((size_t)(down_first ? from.width : to.width) * BYTES * LINES);
    if (!work->ring || !work->lines || !made) goto end;
    if (down_first)
        down_then_across(work, made);
    else
        across_then_down(work, made);
    done = 0;
end:
    free_axis(&work->columns);
    free_axis(&work->rows);
    free(work->ring);
    free(work->lines);
    free(made);
    return done;
}

static const uint8_t *lent_pixels(PyObject *capsule, Size size) {
    const struct ArrowArray *array = PyCapsule_GetPointer(capsule, "arrow_array");
    if (!array) return NULL;
    int64_t pixels = (int64_t)size.width * size.height;
    if (array->length == pixels && array->offset == 0 && array->n_children == 1 && array->children[0]->offset == 0 &&
        array->children[0]->length == pixels * BYTES && array->children[0]->n_buffers == 2)
        return array->children[0]->buffers[1];
    PyErr_SetString(PyExc_ValueError, "the array must hold four bytes for each pixel");
    return NULL;
}

/* resize_planes(out, arrow_array, (width, height), (new_width, new_height), kernel, down_first, fast) */

static PyObject *resize_planes(PyObject *self, PyObject *args) {
    PyObject *out_object, *capsule;
    Size from, to;
    int kernel, down_first, fast, failed = 0;
    Py_buffer out;
    if (!PyArg_ParseTuple(args, "OO(ii)(ii)ipp", &out_object, &capsule, &from.width, &from.height, &to.width, &to.height,
                          &kernel, &down_first, &fast))
        return NULL;
    if (kernel < 0 || kernel > 2 || to.width < 1 || to.height < 1 || from.width < to.width || from.height < to.height ||
        to.width > MOST_SIDE || to.height > MOST_SIDE) {
        PyErr_SetString(PyExc_ValueError, "an image can only be made smaller, to sides of 1 to 65,536 pixels");
        return NULL;
    }
    const uint8_t *pixels = lent_pixels(capsule, from);
    if (!pixels || PyObject_GetBuffer(out_object, &out, PyBUF_WRITABLE) < 0) return NULL;
    if (out.len != (Py_ssize_t)to.width * to.height * 3) {
        PyBuffer_Release(&out);
        PyErr_SetString(PyExc_ValueError, "out must hold three planes");
        return NULL;
    }
    Work work = {.pixels = pixels, .out = out.buf, .from = from, .to = to, .fast = fast && has_avx2()};
    Py_BEGIN_ALLOW_THREADS
    failed = resize(&work, KERNELS[kernel], down_first && from.height != to.height);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&out);
    return failed ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"resize_planes", resize_planes, METH_VARARGS, "Write the planes of an RGB image, resized as Pillow does."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "forebay.images._resize", "Pillow's resize, to planes.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__resize(void) { return PyModuleDef_Init(&module); }
