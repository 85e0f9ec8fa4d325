/* Loops over bytes that NumPy makes in several passes, or with the GIL held. Each is independent, checks sizes before it
   writes, then releases the GIL, if it works for longer than a switch between threads takes or reads mapped files.
   `reference.py` defines all of them; tests/kernels compares the two.

   Optional: without a compiler, `forebay.kernels` uses the reference. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif

enum { IGNORED_LABEL = -100, MANY = 256 * 1024 };

/* The GIL, released for a loop over many bytes in memory; one over fewer ends before another thread has woken up. */
static PyThreadState *released(Py_ssize_t bytes) { return bytes > MANY ? PyEval_SaveThread() : NULL; }

static void held_again(PyThreadState *state) {
    if (state) PyEval_RestoreThread(state);
}

static int failed(const char *reason) {
    PyErr_SetString(PyExc_ValueError, reason);
    return -1;
}

/* Buffers that are released together. */
typedef struct {
    Py_buffer all[8];
    int count;
} Buffers;

static int take(Buffers *buffers, PyObject *object, int flags) {
    if (PyObject_GetBuffer(object, &buffers->all[buffers->count], flags) < 0) return -1;
    buffers->count++;
    return 0;
}

/* An optional output: None has no memory. */
static int take_or_none(Buffers *buffers, PyObject *object, void **memory, Py_ssize_t bytes) {
    *memory = NULL;
    if (object == Py_None) return 0;
    if (take(buffers, object, PyBUF_WRITABLE) < 0) return -1;
    *memory = buffers->all[buffers->count - 1].buf;
    return buffers->all[buffers->count - 1].len == bytes ? 0 : failed("an output has another size than its rows");
}

static void release(Buffers *buffers) {
    while (buffers->count) PyBuffer_Release(&buffers->all[--buffers->count]);
}

static Py_ssize_t words_of(const Py_buffer *buffer) { return buffer->len / (Py_ssize_t)sizeof(int64_t); }

/* Rows of a shuffled batch are far apart in memory: while one is copied, the beginning of the next one arrives; the CPU
   sees the rest coming. */
enum { LINE = 64, BEGINNING = 512 };

static void copy_row(char *out, int64_t row, Py_ssize_t bytes, int64_t next) {
#if defined(__GNUC__)
    for (Py_ssize_t at = 0; next && at < bytes && at < BEGINNING; at += LINE)
        __builtin_prefetch((const char *)(intptr_t)next + at);
#endif
    if (bytes) memcpy(out, (const char *)(intptr_t)row, (size_t)bytes);
}

/* gather(out, addresses, sizes): copy sizes[i] bytes from each address to `out`, one item after the other.

   addresses, sizes     int64 */

static PyObject *gather(PyObject *self, PyObject *args) {
    PyObject *objects[3], *result = NULL;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOO", &objects[0], &objects[1], &objects[2])) return NULL;
    for (int at = 0; at < 3; at++)
        if (take(&buffers, objects[at], at ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) goto end;
    Py_ssize_t count = words_of(&buffers.all[1]);
    const int64_t *addresses = buffers.all[1].buf, *sizes = buffers.all[2].buf;
    int64_t left = buffers.all[0].len;
    int sound = buffers.all[2].len == buffers.all[1].len;
    for (Py_ssize_t at = 0; sound && at < count; at++) {
        sound = sizes[at] >= 0 && sizes[at] <= left;
        left -= sizes[at];
    }
    if (!sound || left) {
        failed("out must hold exactly the items at the addresses");
        goto end;
    }
    char *out = buffers.all[0].buf;
    Py_BEGIN_ALLOW_THREADS /* a mapped page may have to be read from disk */
    for (Py_ssize_t at = 0; at < count; at++) {
        copy_row(out, addresses[at], (Py_ssize_t)sizes[at], at + 1 < count ? addresses[at + 1] : 0);
        out += sizes[at];
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

/* permute(cells, size, highs, lows, keys): replace each cell by where the shuffle of forebay.order.shuffle puts it.

   cells, keys      uint64; a key for each round */

static const uint64_t HASH_FIRST = 0xBF58476D1CE4E5B9, HASH_SECOND = 0x94D049BB133111EB;

static uint64_t rotated(uint64_t half, uint64_t other, uint64_t key, uint64_t count) {
    uint64_t word = (other ^ key) * HASH_FIRST;
    word = (word ^ word >> 32) * HASH_SECOND;
    half += (word >> 32) * count >> 32;
    return half < count ? half : half - count;
}

static PyObject *permute(PyObject *self, PyObject *args) {
    PyObject *cells_object, *keys_object, *result = NULL;
    unsigned long long size, highs, lows;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OKKKO", &cells_object, &size, &highs, &lows, &keys_object)) return NULL;
    if (take(&buffers, cells_object, PyBUF_WRITABLE) < 0 || take(&buffers, keys_object, PyBUF_SIMPLE) < 0) goto end;
    Py_ssize_t count = buffers.all[0].len / (Py_ssize_t)sizeof(uint64_t);
    Py_ssize_t rounds = buffers.all[1].len / (Py_ssize_t)sizeof(uint64_t);
    uint64_t *cells = buffers.all[0].buf;
    const uint64_t *keys = buffers.all[1].buf;
    int sound = size && size <= 1ULL << 62 && highs && lows && highs <= 1ULL << 32 && lows <= 1ULL << 32 &&
                highs * lows >= size;
    for (Py_ssize_t at = 0; sound && at < count; at++) sound = cells[at] < size; /* else it would turn for ever */
    if (!sound) {
        failed("cells must be below the size, and highs x lows at least the size");
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < count; at++) {
        uint64_t cell = cells[at];
        do {
            uint64_t high = cell / lows, low = cell % lows;
            for (Py_ssize_t round = 0; round < rounds; round++)
                if (round % 2)
                    low = rotated(low, high, keys[round], lows);
                else
                    high = rotated(high, low, keys[round], highs);
            cell = high * lows + low;
        } while (cell >= size);
        cells[at] = cell;
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

/* locate_rows(chunks, within, rows, starts) -> bool

   Write the chunk of each row, and the row's number in it. Chunk c has the rows starts[c] to starts[c + 1]; all are
   int64. Returns False, and leaves the outputs unfinished, at the first row that is in no chunk. */

static Py_ssize_t chunk_of(int64_t row, const int64_t *starts, Py_ssize_t chunks) {
    if (row < starts[0] || row >= starts[chunks]) return -1;
    Py_ssize_t low = 0; /* starts[low] <= row < starts[low + left] */
    for (Py_ssize_t left = chunks; left > 1; left -= left / 2) /* no branch: it would be guessed wrong half the time */
        low = starts[low + left / 2] <= row ? low + left / 2 : low;
    return low;
}

static PyObject *locate_rows(PyObject *self, PyObject *args) {
    PyObject *objects[4], *result = NULL;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOOO", &objects[0], &objects[1], &objects[2], &objects[3])) return NULL;
    for (int at = 0; at < 4; at++)
        if (take(&buffers, objects[at], at < 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) goto end;
    Py_ssize_t count = buffers.all[2].len / (Py_ssize_t)sizeof(int64_t);
    Py_ssize_t chunks = buffers.all[3].len / (Py_ssize_t)sizeof(int64_t) - 1;
    if (chunks < 0 || buffers.all[0].len != buffers.all[2].len || buffers.all[1].len != buffers.all[2].len) {
        failed("outputs must have one number for each row, and starts at least one");
        goto end;
    }
    int64_t *found = buffers.all[0].buf, *within = buffers.all[1].buf;
    const int64_t *rows = buffers.all[2].buf, *starts = buffers.all[3].buf;
    Py_ssize_t at = 0;
    PyThreadState *state = released(buffers.all[2].len);
    for (; at < count; at++) {
        Py_ssize_t chunk = chunk_of(rows[at], starts, chunks);
        if (chunk < 0) break;
        found[at] = chunk;
        within[at] = rows[at] - starts[chunk];
    }
    held_again(state);
    result = PyBool_FromLong(at == count);
end:
    release(&buffers);
    return result;
}

/* read_rows(out, chunks, within, starts, tables) -> bool

   Copy a part of the same size of each row: of row within[i] of chunk chunks[i], from byte starts[i] of the row on; from
   its beginning if `starts` is None. Returns False, and leaves `out` unfinished, at the first row that must not be read.

   chunks, within, starts     int64
   tables                     a tuple for one column; a row is read only if all of it agrees that it can be:
       bases          int64: the address of the first row of each chunk; 0 if it is not mapped
       sizes          int64: the bytes of each chunk's rows
       stride         bytes from one row to the next
       first_blocks   int64: the number of the first block of each chunk, and at the end the number of all blocks
       checked        a bit for every block: whether its checksum was compared
       block_rows     rows of a block */

typedef struct {
    const int64_t *bases, *sizes, *first_blocks;
    const uint8_t *checked;
    int64_t chunks, stride, block_rows, blocks;
} Mapped;

static int take_mapped(Buffers *buffers, PyObject *tables, Mapped *mapped) {
    PyObject *objects[4];
    const Py_buffer *taken = &buffers->all[buffers->count];
    Py_ssize_t stride, block_rows;
    if (!PyArg_ParseTuple(tables, "OOnOOn", &objects[0], &objects[1], &stride, &objects[2], &objects[3], &block_rows))
        return -1;
    for (int at = 0; at < 4; at++)
        if (take(buffers, objects[at], PyBUF_SIMPLE) < 0) return -1;
    mapped->chunks = words_of(&taken[0]), mapped->blocks = taken[3].len * 8;
    mapped->stride = stride, mapped->block_rows = block_rows;
    if (stride < 1 || block_rows < 1 || taken[1].len != taken[0].len || words_of(&taken[2]) != mapped->chunks + 1)
        return failed("tables must have one number for each chunk");
    mapped->bases = taken[0].buf, mapped->sizes = taken[1].buf;
    mapped->first_blocks = taken[2].buf, mapped->checked = taken[3].buf;
    return 0;
}

/* Where a part of a row is; 0 if it must not be read. Another thread may write 0 to a base as it closes a map: the base
   is loaded once, so that what was compared is what is used. */
static int64_t part_of_row(const Mapped *mapped, int64_t chunk, int64_t within, int64_t start, int64_t bytes) {
    if (chunk < 0 || chunk >= mapped->chunks || within < 0 || within > INT64_MAX / 4 / mapped->stride) return 0;
    int64_t base = *(const volatile int64_t *)&mapped->bases[chunk], first = within * mapped->stride;
    int64_t block = mapped->first_blocks[chunk] + within / mapped->block_rows;
    if (!base || block < 0 || block >= mapped->first_blocks[chunk + 1] || block >= mapped->blocks) return 0;
    if (!(mapped->checked[block >> 3] >> (block & 7) & 1)) return 0;
    if (start < 0 || start > mapped->sizes[chunk] || first + start > mapped->sizes[chunk] - bytes) return 0;
    return base + first + start;
}

static PyObject *read_rows(PyObject *self, PyObject *args) {
    PyObject *objects[4], *tables, *result = NULL;
    Mapped mapped;
    Buffers buffers = {.count = 0};
    const int64_t *starts = NULL;
    if (!PyArg_ParseTuple(args, "OOOOO", &objects[0], &objects[1], &objects[2], &objects[3], &tables)) return NULL;
    for (int at = 0; at < 3; at++)
        if (take(&buffers, objects[at], at ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) goto end;
    Py_ssize_t count = words_of(&buffers.all[1]), bytes = count ? buffers.all[0].len / count : 0, at = 0;
    int sound = buffers.all[2].len == buffers.all[1].len && buffers.all[0].len == bytes * count;
    if (objects[3] != Py_None) {
        if (take(&buffers, objects[3], PyBUF_SIMPLE) < 0) goto end;
        starts = buffers.all[3].buf;
        sound = sound && buffers.all[3].len == buffers.all[1].len;
    }
    if (take_mapped(&buffers, tables, &mapped) < 0) goto end;
    if (!sound) {
        failed("out must hold one item for each row, and every row needs a chunk and a number");
        goto end;
    }
    char *out = buffers.all[0].buf;
    const int64_t *chunks = buffers.all[1].buf, *within = buffers.all[2].buf;
    Py_BEGIN_ALLOW_THREADS /* a mapped page may have to be read from disk */
    int64_t row = count ? part_of_row(&mapped, chunks[0], within[0], starts ? starts[0] : 0, bytes) : 0, next;
    for (; at < count && row; at++, row = next) {
        next = 0;
        if (at + 1 < count)
            next = part_of_row(&mapped, chunks[at + 1], within[at + 1], starts ? starts[at + 1] : 0, bytes);
        copy_row(out + at * bytes, row, bytes, next);
    }
    Py_END_ALLOW_THREADS
    result = PyBool_FromLong(at == count);
end:
    release(&buffers);
    return result;
}

/* pack_tokens(tokens, token_bytes, width, lengths, shifted, wide, labels, positions) -> bool

   Write what a language model is trained on, of rows that hold several documents. The outputs are int64 [rows, width], or
   None. Returns False, and leaves the outputs unfinished, at a row whose documents are longer than the row.

   tokens       uint16, uint32 or int64 [rows, width]
   lengths      int32 [rows, documents], filled up with 0; the rest of a row is padding

       tokens       5 6 7 8 9 0 0     lengths 3 2
       positions    0 1 2 0 1 0 1
       shifted      6 7 . 9 . . .     . = -100
       unshifted    . 6 7 . 9 . . */

static FAST void widen_16(int64_t *out, const uint16_t *tokens, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = tokens[at];
}

static FAST void widen_32(int64_t *out, const uint32_t *tokens, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = tokens[at];
}

static FAST void count_up(int64_t *out, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = at;
}

static FAST void ignore(int64_t *out, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = IGNORED_LABEL;
}

static void widen(int64_t *out, const char *tokens, Py_ssize_t token_bytes, Py_ssize_t count) {
    if (token_bytes == 2)
        widen_16(out, (const uint16_t *)tokens, count);
    else if (token_bytes == 4)
        widen_32(out, (const uint32_t *)tokens, count);
    else
        memcpy(out, tokens, (size_t)count * sizeof(*out));
}

static int fits(const int32_t *lengths, Py_ssize_t documents, int64_t width) {
    int64_t total = 0;
    for (Py_ssize_t at = 0; at < documents; at++) {
        if (lengths[at] < 0) return 0;
        total += lengths[at];
    }
    return total <= width;
}

/* Labels of tokens that have one already are -100 where a document ends or begins, and in the padding. */
static void cut_labels(int64_t *labels, Py_ssize_t width, const int32_t *lengths, Py_ssize_t documents, int shifted) {
    Py_ssize_t stop = 0;
    for (Py_ssize_t at = 0; at < documents; at++) {
        if (!lengths[at]) continue;
        if (!shifted) labels[stop] = IGNORED_LABEL;
        stop += lengths[at];
        if (shifted) labels[stop - 1] = IGNORED_LABEL;
    }
    ignore(labels + stop, width - stop);
}

static void position_row(int64_t *positions, Py_ssize_t width, const int32_t *lengths, Py_ssize_t documents) {
    Py_ssize_t stop = 0;
    for (Py_ssize_t at = 0; at < documents; at++) {
        count_up(positions + stop, lengths[at]);
        stop += lengths[at];
    }
    count_up(positions + stop, width - stop);
}

enum { PIECE = 1024 }; /* bytes of tokens that stay in the fastest cache between two outputs */

static void token_row(const char *tokens, Py_ssize_t item, Py_ssize_t width, int shifted, int64_t *wide, int64_t *labels) {
    Py_ssize_t step = PIECE / item;
    for (Py_ssize_t at = 0; at < width; at += step) {
        Py_ssize_t count = width - at < step ? width - at : step, last = at + count == width;
        const char *piece = tokens + at * item;
        if (wide) widen(wide + at, piece, item, count);
        if (labels) widen(labels + at, shifted ? piece + item : piece, item, shifted ? count - last : count);
    }
}

static PyObject *pack_tokens(PyObject *self, PyObject *args) {
    PyObject *tokens_object, *lengths_object, *outputs[3], *result = NULL;
    Py_ssize_t item, width;
    int shifted;
    void *memory[3] = {NULL, NULL, NULL};
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OnnOpOOO", &tokens_object, &item, &width, &lengths_object, &shifted, &outputs[0],
                          &outputs[1], &outputs[2]))
        return NULL;
    if (take(&buffers, tokens_object, PyBUF_SIMPLE) < 0 || take(&buffers, lengths_object, PyBUF_SIMPLE) < 0) goto end;
    Py_ssize_t rows = item > 0 && width > 0 ? buffers.all[0].len / item / width : 0;
    Py_ssize_t lengths_count = buffers.all[1].len / (Py_ssize_t)sizeof(int32_t);
    Py_ssize_t documents = rows ? lengths_count / rows : 0;
    if ((item != 2 && item != 4 && item != 8) || width < 1 || buffers.all[0].len != rows * width * item ||
        lengths_count != rows * documents) {
        failed("tokens must be whole rows of 2, 4 or 8 bytes each, with the same number of lengths");
        goto end;
    }
    for (int at = 0; at < 3; at++)
        if (take_or_none(&buffers, outputs[at], &memory[at], rows * width * (Py_ssize_t)sizeof(int64_t)) < 0) goto end;
    int64_t *wide = memory[0], *labels = memory[1], *positions = memory[2];
    Py_ssize_t row = 0;
    PyThreadState *state = released(buffers.all[0].len);
    for (; row < rows; row++) {
        const char *tokens = (const char *)buffers.all[0].buf + row * width * item;
        const int32_t *lengths = (const int32_t *)buffers.all[1].buf + row * documents;
        if (!fits(lengths, documents, width)) break;
        token_row(tokens, item, width, shifted, wide ? wide + row * width : NULL, labels ? labels + row * width : NULL);
        if (labels) cut_labels(labels + row * width, width, lengths, documents, shifted);
        if (positions) position_row(positions + row * width, width, lengths, documents);
    }
    held_again(state);
    result = PyBool_FromLong(row == rows);
end:
    release(&buffers);
    return result;
}

/* mirror(out, content, width): lines of `width` bytes, each reversed. */

static FAST void reverse(uint8_t *out, const uint8_t *line, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = line[count - 1 - at];
}

static PyObject *mirror(PyObject *self, PyObject *args) {
    PyObject *out_object, *content_object, *result = NULL;
    Py_ssize_t width;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOn", &out_object, &content_object, &width)) return NULL;
    if (take(&buffers, out_object, PyBUF_WRITABLE) < 0 || take(&buffers, content_object, PyBUF_SIMPLE) < 0) goto end;
    Py_ssize_t bytes = buffers.all[1].len;
    if (width < 1 || bytes % width || buffers.all[0].len != bytes) {
        failed("out and content must have lines of the same width");
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < bytes; at += width)
        reverse((uint8_t *)buffers.all[0].buf + at, (const uint8_t *)buffers.all[1].buf + at, width);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

/* paint(canvas, size, content, box, pad)
   paint_scaled(canvas, size, content, box, pad, scale, shift)

   Paint content [3, lines, columns] in its box on a canvas [3, height, width]; scaled is float32, value * scale + shift. */

typedef struct {
    Py_ssize_t height, width, left, top, columns, lines;
} Placement;

static int placed(const Placement *at, Py_ssize_t canvas_values, Py_ssize_t content_bytes) {
    if (at->height < 0 || at->width < 0 || at->left < 0 || at->top < 0 || at->columns < 0 || at->lines < 0 ||
        at->height > 65536 || at->width > 65536 || at->columns > at->width - at->left ||
        at->lines > at->height - at->top)
        return failed("the box is outside the canvas");
    if (canvas_values != 3 * at->height * at->width || content_bytes != 3 * at->lines * at->columns)
        return failed("canvas and content must have the sizes that are passed");
    return 0;
}

static void paint_plane(const Placement *at, uint8_t *canvas, const uint8_t *content, uint8_t pad) {
    Py_ssize_t right = at->width - at->left - at->columns, below = at->height - at->top - at->lines;
    memset(canvas, pad, (size_t)(at->top * at->width));
    canvas += at->top * at->width;
    for (Py_ssize_t line = 0; line < at->lines; line++) {
        memset(canvas, pad, (size_t)at->left);
        memcpy(canvas + at->left, content, (size_t)at->columns);
        memset(canvas + at->left + at->columns, pad, (size_t)right);
        canvas += at->width;
        content += at->columns;
    }
    memset(canvas, pad, (size_t)(below * at->width));
}

static PyObject *paint(PyObject *self, PyObject *args) {
    PyObject *canvas, *content, *result = NULL;
    Placement at;
    uint8_t pad[3];
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "O(nn)O(nnnn)(bbb)", &canvas, &at.height, &at.width, &content, &at.left, &at.top,
                          &at.columns, &at.lines, &pad[0], &pad[1], &pad[2]))
        return NULL;
    if (take(&buffers, canvas, PyBUF_WRITABLE) < 0 || take(&buffers, content, PyBUF_SIMPLE) < 0) goto end;
    if (placed(&at, buffers.all[0].len, buffers.all[1].len) < 0) goto end;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t plane = 0; plane < 3; plane++)
        paint_plane(&at, (uint8_t *)buffers.all[0].buf + plane * at.height * at.width,
                    (const uint8_t *)buffers.all[1].buf + plane * at.lines * at.columns, pad[plane]);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

static FAST void fill_floats(float *out, float value, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = value;
}

/* Two roundings, as numpy's multiply and add: the file is compiled without contraction to a fused multiply-add. */
static FAST void scale_line(float *out, const uint8_t *line, Py_ssize_t count, float scale, float shift) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = (float)line[at] * scale + shift;
}

static void paint_scaled_plane(const Placement *at, float *canvas, const uint8_t *content, float pad, float scale,
                               float shift) {
    Py_ssize_t right = at->width - at->left - at->columns, below = at->height - at->top - at->lines;
    fill_floats(canvas, pad, at->top * at->width);
    canvas += at->top * at->width;
    for (Py_ssize_t line = 0; line < at->lines; line++) {
        fill_floats(canvas, pad, at->left);
        scale_line(canvas + at->left, content, at->columns, scale, shift);
        fill_floats(canvas + at->left + at->columns, pad, right);
        canvas += at->width;
        content += at->columns;
    }
    fill_floats(canvas, pad, below * at->width);
}

static PyObject *paint_scaled(PyObject *self, PyObject *args) {
    PyObject *canvas, *content, *result = NULL;
    Placement at;
    float pad[3], scale[3], shift[3];
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "O(nn)O(nnnn)(fff)(fff)(fff)", &canvas, &at.height, &at.width, &content, &at.left,
                          &at.top, &at.columns, &at.lines, &pad[0], &pad[1], &pad[2], &scale[0], &scale[1], &scale[2],
                          &shift[0], &shift[1], &shift[2]))
        return NULL;
    if (take(&buffers, canvas, PyBUF_WRITABLE) < 0 || take(&buffers, content, PyBUF_SIMPLE) < 0) goto end;
    if (buffers.all[0].len % (Py_ssize_t)sizeof(float)) {
        failed("the canvas must be float32");
        goto end;
    }
    if (placed(&at, buffers.all[0].len / (Py_ssize_t)sizeof(float), buffers.all[1].len) < 0) goto end;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t plane = 0; plane < 3; plane++)
        paint_scaled_plane(&at, (float *)buffers.all[0].buf + plane * at.height * at.width,
                           (const uint8_t *)buffers.all[1].buf + plane * at.lines * at.columns, pad[plane],
                           scale[plane], shift[plane]);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

/* token_places(places, ids, skipped, offsets, bytes, text) -> bool

   Write where each token begins in `text`. Token id is bytes[offsets[id]:offsets[id + 1]] without its first skipped[i]
   bytes; all tokens, one behind the other, must be the text. Returns False at the first that is not.

   places, offsets      int64
   ids                  uint32
   skipped              uint8, like ids */

static PyObject *token_places(PyObject *self, PyObject *args) {
    PyObject *objects[6], *result = NULL;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOOOOO", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4], &objects[5]))
        return NULL;
    for (int at = 0; at < 6; at++)
        if (take(&buffers, objects[at], at ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) goto end;
    Py_ssize_t count = buffers.all[1].len / (Py_ssize_t)sizeof(uint32_t);
    Py_ssize_t ids_known = buffers.all[3].len / (Py_ssize_t)sizeof(int64_t) - 1;
    if (buffers.all[0].len / (Py_ssize_t)sizeof(int64_t) != count || buffers.all[2].len != count || ids_known < 0) {
        failed("places and skipped must have one number for each id");
        goto end;
    }
    int64_t *places = buffers.all[0].buf;
    const uint32_t *ids = buffers.all[1].buf;
    const uint8_t *skipped = buffers.all[2].buf;
    const int64_t *offsets = buffers.all[3].buf;
    const char *bytes = buffers.all[4].buf, *text = buffers.all[5].buf;
    int64_t size = buffers.all[4].len, text_size = buffers.all[5].len, begin = 0;
    Py_ssize_t at = 0;
    Py_BEGIN_ALLOW_THREADS
    for (; at < count; at++) {
        if ((Py_ssize_t)ids[at] >= ids_known) break;
        int64_t start = offsets[ids[at]], stop = offsets[ids[at] + 1];
        if (start < 0 || stop > size || stop - start < skipped[at]) break;
        start += skipped[at];
        if (stop - start > text_size - begin) break;
        int64_t same = 0, length = stop - start; /* tokens are short: a call of memcmp takes longer */
        if (length > 0 && length <= 8 && start + 8 <= size && begin + 8 <= text_size) {
            uint64_t mine, theirs; /* on big-endian machines the loop below decides */
            memcpy(&mine, bytes + start, 8);
            memcpy(&theirs, text + begin, 8);
            if (length == 8 ? mine == theirs : PY_LITTLE_ENDIAN && !((mine ^ theirs) << (64 - 8 * length))) same = length;
        }
        while (same < length && bytes[start + same] == text[begin + same]) same++;
        if (same < length) break;
        places[at] = begin;
        begin += length;
    }
    Py_END_ALLOW_THREADS
    result = PyBool_FromLong(at == count && begin == text_size);
end:
    release(&buffers);
    return result;
}

/* best_fit(bins, lengths, capacity): write the bin of each item. Lengths must not rise.

   An item goes into the bin with the least room that fits it; of several, into the one that has had this room longest;
   if none fits, into a new one. Bins with the same room are a queue; a bit for each room says whether it has a bin, and a
   bit for each 64 of them whether one of these is set.

   bins, lengths        int64 */

static int lowest_bit(uint64_t bits) {
#if defined(__GNUC__)
    return __builtin_ctzll(bits);
#else
    int at = 0;
    while (!(bits >> at & 1)) at++;
    return at;
#endif
}

static int64_t next_bit(const uint64_t *words, int64_t count, int64_t from) {
    int64_t at = from >> 6;
    if (at >= count) return -1;
    uint64_t bits = words[at] >> (from & 63) << (from & 63);
    while (!bits && ++at < count) bits = words[at];
    return bits ? (at << 6) + lowest_bit(bits) : -1;
}

typedef struct {
    uint64_t *rooms, *groups;
    int64_t group_words;
    int64_t *first, *last, *next; /* first and last bin of the queue of a room, the next one of a bin */
} Rooms;

static int64_t least_room(const Rooms *rooms, int64_t length) {
    uint64_t here = rooms->rooms[length >> 6] >> (length & 63);
    if (here) return length + lowest_bit(here);
    int64_t group = next_bit(rooms->groups, rooms->group_words, (length >> 6) + 1);
    return group < 0 ? -1 : (group << 6) + lowest_bit(rooms->rooms[group]);
}

static int64_t taken(Rooms *rooms, int64_t room) {
    int64_t bin = rooms->first[room];
    if (bin != rooms->last[room]) {
        rooms->first[room] = rooms->next[bin];
        return bin;
    }
    rooms->rooms[room >> 6] &= ~(1ULL << (room & 63));
    if (!rooms->rooms[room >> 6]) rooms->groups[room >> 12] &= ~(1ULL << (room >> 6 & 63));
    return bin;
}

static void put_back(Rooms *rooms, int64_t room, int64_t bin) {
    if (rooms->rooms[room >> 6] >> (room & 63) & 1)
        rooms->next[rooms->last[room]] = bin;
    else
        rooms->first[room] = bin;
    rooms->last[room] = bin;
    rooms->rooms[room >> 6] |= 1ULL << (room & 63);
    rooms->groups[room >> 12] |= 1ULL << (room >> 6 & 63);
}

static int fill_bins(int64_t *bins, const int64_t *lengths, Py_ssize_t count, int64_t capacity, Rooms *rooms) {
    int64_t opened = 0, before = capacity;
    for (Py_ssize_t at = 0; at < count; at++) {
        int64_t length = lengths[at];
        if (length < 1 || length > before) return 0;
        int64_t room = least_room(rooms, length);
        int64_t bin = room < 0 ? opened++ : taken(rooms, room);
        int64_t left = (room < 0 ? capacity : room) - length;
        if (left) put_back(rooms, left, bin);
        bins[at] = bin;
        before = length;
    }
    return 1;
}

static PyObject *best_fit(PyObject *self, PyObject *args) {
    PyObject *bins_object, *lengths_object, *result = NULL;
    Py_ssize_t capacity;
    Buffers buffers = {.count = 0};
    uint64_t *memory = NULL;
    if (!PyArg_ParseTuple(args, "OOn", &bins_object, &lengths_object, &capacity)) return NULL;
    if (take(&buffers, bins_object, PyBUF_WRITABLE) < 0 || take(&buffers, lengths_object, PyBUF_SIMPLE) < 0) goto end;
    Py_ssize_t count = buffers.all[1].len / (Py_ssize_t)sizeof(int64_t);
    if (buffers.all[0].len != buffers.all[1].len || capacity < 1 || capacity > INT32_MAX || count > PY_SSIZE_T_MAX / 64) {
        failed("bins must have one number for each length, and the capacity must be positive");
        goto end;
    }
    int64_t words = (capacity >> 6) + 1, groups = (words >> 6) + 1;
    memory = PyMem_Calloc((size_t)(words + groups + 2 * (capacity + 1) + count + 1), sizeof(uint64_t));
    if (!memory) {
        PyErr_NoMemory();
        goto end;
    }
    int64_t *queues = (int64_t *)(memory + words + groups);
    Rooms rooms = {memory, memory + words, groups, queues, queues + capacity + 1, queues + 2 * (capacity + 1)};
    int fits;
    Py_BEGIN_ALLOW_THREADS
    fits = fill_bins(buffers.all[0].buf, buffers.all[1].buf, count, capacity, &rooms);
    Py_END_ALLOW_THREADS
    if (fits)
        result = Py_NewRef(Py_None);
    else
        failed("lengths must be 1 to the capacity, and must not rise");
end:
    PyMem_Free(memory);
    release(&buffers);
    return result;
}

/* copy_runs(out, source, targets, starts, lengths): copy source[start:start + length] to out[target:] for each run.

   targets, starts, lengths     int64, in bytes */

static PyObject *copy_runs(PyObject *self, PyObject *args) {
    PyObject *objects[5], *result = NULL;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOOOO", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4])) return NULL;
    for (int at = 0; at < 5; at++)
        if (take(&buffers, objects[at], at ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) goto end;
    Py_ssize_t size = buffers.all[2].len, count = size / (Py_ssize_t)sizeof(int64_t);
    const int64_t *targets = buffers.all[2].buf, *starts = buffers.all[3].buf, *lengths = buffers.all[4].buf;
    int64_t out_size = buffers.all[0].len, source_size = buffers.all[1].len;
    int sound = buffers.all[3].len == size && buffers.all[4].len == size;
    for (Py_ssize_t at = 0; sound && at < count; at++)
        sound = lengths[at] >= 0 && targets[at] >= 0 && starts[at] >= 0 && lengths[at] <= out_size &&
                lengths[at] <= source_size && targets[at] <= out_size - lengths[at] &&
                starts[at] <= source_size - lengths[at];
    if (!sound) {
        failed("a run lies outside of out or source");
        goto end;
    }
    char *out = buffers.all[0].buf;
    const char *source = buffers.all[1].buf;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < count; at++) memcpy(out + targets[at], source + starts[at], (size_t)lengths[at]);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

/* frame_documents(out, item_bytes, ids, offsets, begin, end): write the ids of documents one after the other, each between
   the ids `begin` and `end`; -1 for none.

   out          2 or 4 bytes an id, of which it has the lowest bytes
   ids          uint32
   offsets      int64 [documents + 1]: where the ids of each document begin, and where the last one ends */

static FAST void narrow_16(uint16_t *out, const uint32_t *ids, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = (uint16_t)ids[at];
}

static char *put_ids(char *out, Py_ssize_t item_bytes, const uint32_t *ids, Py_ssize_t count) {
    if (item_bytes == 2)
        narrow_16((uint16_t *)out, ids, count);
    else
        memcpy(out, ids, (size_t)count * sizeof(*ids));
    return out + count * item_bytes;
}

static PyObject *frame_documents(PyObject *self, PyObject *args) {
    PyObject *objects[3], *result = NULL;
    Py_ssize_t item_bytes;
    long long begin, end;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OnOOLL", &objects[0], &item_bytes, &objects[1], &objects[2], &begin, &end)) return NULL;
    for (int at = 0; at < 3; at++)
        if (take(&buffers, objects[at], at ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) goto end;
    const uint32_t *ids = buffers.all[1].buf, first = (uint32_t)begin, last = (uint32_t)end;
    const int64_t *offsets = buffers.all[2].buf;
    Py_ssize_t count = buffers.all[1].len / (Py_ssize_t)sizeof(*ids);
    Py_ssize_t documents = buffers.all[2].len / (Py_ssize_t)sizeof(*offsets) - 1;
    int sound = (item_bytes == 2 || item_bytes == 4) && documents >= 0 && offsets[0] == 0 && offsets[documents] == count;
    for (Py_ssize_t at = 0; sound && at < documents; at++) sound = offsets[at] <= offsets[at + 1];
    if (!sound || buffers.all[0].len != (count + documents * ((begin >= 0) + (end >= 0))) * item_bytes) {
        failed("out must have room for the ids of all documents, and offsets must rise to the end of ids");
        goto end;
    }
    char *out = buffers.all[0].buf;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < documents; at++) {
        if (begin >= 0) out = put_ids(out, item_bytes, &first, 1);
        out = put_ids(out, item_bytes, ids + offsets[at], offsets[at + 1] - offsets[at]);
        if (end >= 0) out = put_ids(out, item_bytes, &last, 1);
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

/* line_starts(block, at) -> list or None

   Return where the lines of a block of JSON lines begin, the first at 0; a newline before `at` is not looked for. None
   unless each line ends with "}" and the next one begins with "{". */

static PyObject *line_starts(PyObject *self, PyObject *args) {
    PyObject *block, *starts = NULL;
    Py_ssize_t at;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "On", &block, &at) || take(&buffers, block, PyBUF_SIMPLE) < 0) return NULL;
    const char *text = buffers.all[0].buf, *newline;
    Py_ssize_t size = buffers.all[0].len, begin = 0;
    int is_sound = at >= 0;
    starts = PyList_New(0);
    while (starts && is_sound) {
        PyObject *start = PyLong_FromSsize_t(begin);
        if (!start || PyList_Append(starts, start) < 0) Py_CLEAR(starts);
        Py_XDECREF(start);
        newline = starts && at < size ? memchr(text + at, '\n', (size_t)(size - at)) : NULL;
        Py_ssize_t end = newline ? newline - text : size;
        if (end >= size - 1) break;
        is_sound = text[end + 1] == '{' && ((end >= 1 && text[end - 1] == '}') ||
                                            (end >= 2 && text[end - 1] == '\r' && text[end - 2] == '}'));
        begin = at = end + 1;
    }
    release(&buffers);
    if (!starts || is_sound) return starts;
    Py_DECREF(starts);
    return Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"gather", gather, METH_VARARGS, "Copy the items at some addresses to out."},
    {"permute", permute, METH_VARARGS, "Replace each cell by where a shuffle puts it."},
    {"locate_rows", locate_rows, METH_VARARGS, "Write the chunk of each row and its number there; False if it has none."},
    {"read_rows", read_rows, METH_VARARGS, "Copy rows of mapped chunks to out; False where one must not be read."},
    {"pack_tokens", pack_tokens, METH_VARARGS, "Write tokens, labels and positions of packed rows as int64."},
    {"mirror", mirror, METH_VARARGS, "Reverse each line of bytes."},
    {"paint", paint, METH_VARARGS, "Paint content and padding on a canvas of bytes."},
    {"paint_scaled", paint_scaled, METH_VARARGS, "The same, scaled, on a canvas of float32."},
    {"token_places", token_places, METH_VARARGS, "Write where tokens begin in a text; False if they are not its bytes."},
    {"best_fit", best_fit, METH_VARARGS, "Write the bin of each item, best fit, for lengths that do not rise."},
    {"copy_runs", copy_runs, METH_VARARGS, "Copy runs of bytes from one buffer to another."},
    {"frame_documents", frame_documents, METH_VARARGS, "Write the ids of documents between a begin and an end."},
    {"line_starts", line_starts, METH_VARARGS, "Return where JSON lines begin; None if one is not a whole object."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "forebay.kernels._kernels", "Loops in C; reference.py defines them.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&module); }
