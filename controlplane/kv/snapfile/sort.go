package snapfile

import (
	"bufio"
	"bytes"
	"container/heap"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"slices"
)

// sorter sorts records, each of which has a key and a value, by their keys; the sort is stable. Records that exceed the
// memory limit are stored as sorted runs, one after another, in an unlinked file.
type sorter struct {
	dir    string // directory of the unlinked file
	memory int    // maximum memory in bytes

	arena   []byte
	records []record
	file    *os.File
	out     *bufio.Writer
	size    int64 // bytes written to file
	runs    []run
}

// record locates a record in the arena, the memory block with the keys and values. The field at is the offset of the
// key, which the value follows. The fields key and value are the lengths of key and value.
type record struct{ at, key, value int }

// run is a sorted sequence of records in the file. The fields from and to are the offsets of its start and its end.
type run struct{ from, to int64 }

const recordBytes = 24 // memory of a record value, in bytes, without the key and value bytes

func newSorter(dir string, memory int) *sorter { return &sorter{dir: dir, memory: memory} }

func (r record) keyIn(arena []byte) []byte   { return arena[r.at : r.at+r.key] }
func (r record) valueIn(arena []byte) []byte { return arena[r.at+r.key : r.at+r.key+r.value] }

// add adds a record with copies of key and value. It may write the previous records to the file.
func (s *sorter) add(key, value []byte) error {
	if len(s.records) > 0 && len(s.arena)+len(key)+len(value)+recordBytes*len(s.records) > s.memory {
		if err := s.spill(); err != nil {
			return fmt.Errorf("write sorted run: %w", err)
		}
	}
	s.records = append(s.records, record{at: len(s.arena), key: len(key), value: len(value)})
	s.arena = append(append(s.arena, key...), value...)
	return nil
}

func (s *sorter) sortArena() {
	slices.SortStableFunc(s.records, func(a, b record) int { return bytes.Compare(a.keyIn(s.arena), b.keyIn(s.arena)) })
}

// spill moves the records in memory to the file, as one run.
func (s *sorter) spill() error {
	if s.file == nil {
		f, err := createUnlinked(s.dir)
		if err != nil {
			return err
		}
		s.file, s.out = f, bufio.NewWriterSize(f, 256<<10)
	}
	s.sortArena()
	from := s.size
	var lengths []byte
	for _, r := range s.records {
		lengths = binary.AppendUvarint(binary.AppendUvarint(lengths[:0], uint64(r.key)), uint64(r.value))
		if _, err := s.out.Write(lengths); err != nil {
			return err
		}
		if _, err := s.out.Write(s.arena[r.at : r.at+r.key+r.value]); err != nil {
			return err
		}
		s.size += int64(len(lengths) + r.key + r.value)
	}
	if err := s.out.Flush(); err != nil {
		return err
	}
	s.runs = append(s.runs, run{from, s.size})
	s.arena, s.records = s.arena[:0], s.records[:0]
	return nil
}

// sorted yields all records in the order of their keys. A yielded record is valid only until the next one is yielded.
// The iterator can be used more than once, but no record may be added after its first use.
func (s *sorter) sorted() iter.Seq2[entry, error] {
	return func(yield func(entry, error) bool) {
		s.sortArena()
		if len(s.runs) == 0 {
			for _, r := range s.records {
				if !yield(entry{r.keyIn(s.arena), r.valueIn(s.arena)}, nil) {
					return
				}
			}
			return
		}
		if err := s.merge(yield); err != nil {
			yield(entry{}, fmt.Errorf("read sorted run: %w", err))
		}
	}
}

// merge yields the records of all runs and of the memory in the order of their keys. For equal keys, earlier runs are
// first, and the records in memory are last.
func (s *sorter) merge(yield func(entry, error) bool) error {
	buffer := max(4<<10, min(256<<10, s.memory/len(s.runs)))
	var all runHeap
	for i, r := range s.runs {
		h := &runReader{run: i, in: bufio.NewReaderSize(io.NewSectionReader(s.file, r.from, r.to-r.from), buffer)}
		if err := h.next(); err != nil {
			return err
		}
		all = append(all, h)
	}
	if len(s.records) > 0 {
		h := &runReader{run: len(s.runs), sorter: s, remaining: s.records}
		if err := h.next(); err != nil {
			return err
		}
		all = append(all, h)
	}
	heap.Init(&all)
	for len(all) > 0 {
		if !yield(all[0].entry, nil) {
			return nil
		}
		err := all[0].next()
		if errors.Is(err, io.EOF) {
			heap.Pop(&all)
			continue
		}
		if err != nil {
			return err
		}
		heap.Fix(&all, 0)
	}
	return nil
}

func (s *sorter) close() error {
	s.arena, s.records = nil, nil
	if s.file == nil {
		return nil
	}
	return s.file.Close()
}

// entry holds the key and value of a record.
type entry struct{ key, value []byte }

// runReader reads the records of a run in order; entry is the current record.
type runReader struct {
	entry
	run int

	in  *bufio.Reader
	buf []byte

	sorter    *sorter // set instead of in if the run is the records in memory
	remaining []record
}

// next reads the next record; it returns io.EOF at the end of the run.
func (h *runReader) next() error {
	if h.sorter != nil {
		if len(h.remaining) == 0 {
			return io.EOF
		}
		r := h.remaining[0]
		h.remaining = h.remaining[1:]
		h.entry = entry{r.keyIn(h.sorter.arena), r.valueIn(h.sorter.arena)}
		return nil
	}
	key, err := binary.ReadUvarint(h.in)
	if err != nil {
		return err // io.EOF only at the end of the run
	}
	value, err := binary.ReadUvarint(h.in)
	if err != nil {
		return errors.Join(err, io.ErrUnexpectedEOF)
	}
	h.buf = slices.Grow(h.buf[:0], int(key+value))[:key+value]
	if _, err := io.ReadFull(h.in, h.buf); err != nil {
		return fmt.Errorf("record: %w", io.ErrUnexpectedEOF)
	}
	h.entry = entry{h.buf[:key], h.buf[key:]}
	return nil
}

// runHeap is a heap of runs, ordered by the key of the current record, then by run number.
type runHeap []*runReader

func (h runHeap) Len() int { return len(h) }
func (h runHeap) Less(i, j int) bool {
	if c := bytes.Compare(h[i].key, h[j].key); c != 0 {
		return c < 0
	}
	return h[i].run < h[j].run
}
func (h runHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *runHeap) Push(x any)   { *h = append(*h, x.(*runReader)) }
func (h *runHeap) Pop() any {
	old := *h
	last := old[len(old)-1]
	*h = old[:len(old)-1]
	return last
}

// createUnlinked creates a temporary file in dir and unlinks it, so that it is deleted when it is closed.
func createUnlinked(dir string) (*os.File, error) {
	f, err := os.CreateTemp(dir, "snapshot-")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
