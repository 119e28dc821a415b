package snapfile

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"io"
)

// bbolt maps the file and trusts its content: a page that points outside of the file crashes the process. So the
// structure of the file is checked before bbolt opens it. Format: https://github.com/etcd-io/bbolt, internal/common.

// Layout of a page: ID (8 bytes), flags (2), number of elements (2), number of overflow pages (4), then the elements.
const (
	pageHeader    = 16
	branchPage    = 0x01
	leafPage      = 0x02
	metaPage      = 0x04
	pageElement   = 16
	bucketElement = 0x01 // flag of a leaf element whose value is a bucket
	bucketHeader  = 16   // bytes before the page of an inline bucket
)

// Layout of a meta page, and limits of page size and depth.
const (
	metaMagic     = 0xED0CDAED
	metaFormat    = 2
	metaSumOffset = 56
	metaBytes     = metaSumOffset + 8
	minPageSize   = 1 << 10
	maxPageSize   = 16 << 20
	maxDepth      = 64 // nesting of buckets and pages; etcd's files have about 5
)

// meta holds the content of a meta page: page size in bytes, ID of the root page, number of pages, and transaction ID.
type meta struct {
	pageSize, root, pages, txid uint64
}

// readMeta returns the newer of the two meta pages whose checksum is valid. The result known is false if neither
// checksum is valid. The result magic reports whether one of the pages starts with bbolt's magic number and version.
func readMeta(r io.ReaderAt) (best meta, known, magic bool, err error) {
	readAt := func(at int64) error {
		b := make([]byte, pageHeader+metaBytes)
		if _, err := r.ReadAt(b, at); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if flags := binary.LittleEndian.Uint16(b[8:]); flags&metaPage == 0 {
			return nil
		}
		b = b[pageHeader:]
		if binary.LittleEndian.Uint32(b) != metaMagic || binary.LittleEndian.Uint32(b[4:]) != metaFormat {
			return nil
		}
		magic = true
		sum := fnv.New64a()
		sum.Write(b[:metaSumOffset])
		if sum.Sum64() != binary.LittleEndian.Uint64(b[metaSumOffset:]) {
			return nil
		}
		m := meta{
			pageSize: uint64(binary.LittleEndian.Uint32(b[8:])), root: binary.LittleEndian.Uint64(b[16:]),
			pages: binary.LittleEndian.Uint64(b[40:]), txid: binary.LittleEndian.Uint64(b[48:]),
		}
		if !known || m.txid > best.txid {
			best, known = m, true
		}
		return nil
	}
	if err := readAt(0); err != nil {
		return meta{}, false, magic, err
	}
	for size := int64(minPageSize); size <= maxPageSize; size *= 2 {
		if known && uint64(size) != best.pageSize {
			continue
		}
		if err := readAt(size); err != nil {
			return meta{}, false, magic, err
		}
	}
	return best, known, magic, nil
}

// checkMeta checks the meta pages and returns the size in bytes that the database needs.
func checkMeta(r io.ReaderAt) (need int64, err error) {
	m, known, magic, err := readMeta(r)
	switch {
	case err != nil:
		return 0, err
	case !known && magic:
		return 0, fmt.Errorf("%w: it has no valid meta page", ErrCorrupt)
	case !known:
		return 0, ErrNotSnapshot
	case m.pageSize < minPageSize || m.pageSize > maxPageSize || m.pages < 3 || m.pages > 1<<40:
		return 0, fmt.Errorf("%w: %d pages of %d bytes", ErrCorrupt, m.pages, m.pageSize)
	}
	return int64(m.pages * m.pageSize), nil
}

// checkTree reads all used pages and checks that each is inside the file, of the right kind and referenced once, and
// that its elements are inside the page.
func checkTree(r io.ReaderAt) error {
	m, _, _, err := readMeta(r)
	if err != nil {
		return err
	}
	t := &tree{r: r, meta: m, visited: make([]uint64, m.pages/64+1)}
	return t.page(m.root, 0)
}

type tree struct {
	r io.ReaderAt
	meta
	visited []uint64 // one bit per page
}

func corruptPage(id uint64, what string) error {
	return fmt.Errorf("%w: page %d: %s", ErrCorrupt, id, what)
}

func (t *tree) page(id uint64, depth int) error {
	if id < 2 || id >= t.pages {
		return corruptPage(id, "outside of the file")
	}
	if depth > maxDepth {
		return corruptPage(id, "nested too deeply")
	}
	header := make([]byte, pageHeader)
	if err := t.read(header, id, 0); err != nil {
		return err
	}
	kind, count, overflow := binary.LittleEndian.Uint16(header[8:]), binary.LittleEndian.Uint16(header[10:]), uint64(binary.LittleEndian.Uint32(header[12:]))
	if binary.LittleEndian.Uint64(header) != id {
		return corruptPage(id, "its header has another ID")
	}
	if overflow >= t.pages-id {
		return corruptPage(id, "longer than the file")
	}
	for i := id; i <= id+overflow; i++ {
		if t.visited[i/64]&(1<<(i%64)) != 0 {
			return corruptPage(i, "used twice")
		}
		t.visited[i/64] |= 1 << (i % 64)
	}
	length := (overflow + 1) * t.pageSize
	if pageHeader+uint64(count)*pageElement > length {
		return corruptPage(id, "more elements than fit into it")
	}
	table := make([]byte, int(count)*pageElement)
	if err := t.read(table, id, pageHeader); err != nil {
		return err
	}
	switch kind {
	case branchPage:
		if count == 0 {
			return corruptPage(id, "a branch page without elements")
		}
		return t.branch(id, depth, table, length)
	case leafPage:
		return t.leaf(id, depth, table, length)
	}
	return corruptPage(id, "of unknown type")
}

func (t *tree) read(b []byte, id, at uint64) error {
	if _, err := t.r.ReadAt(b, int64(id*t.pageSize+at)); err != nil {
		return fmt.Errorf("read page %d: %w", id, err)
	}
	return nil
}

// insidePage reports whether the data of an element lies after the table of elements and inside the page. The element
// is at offset i of the table.
func insidePage(i int, position, data uint64, table []byte, length uint64) bool {
	start := pageHeader + uint64(i) + position
	return start >= pageHeader+uint64(len(table)) && start+data <= length
}

// branch checks the elements of a branch page and the pages that they refer to. An element consists of position (4
// bytes) and length (4) of the key, and a page ID (8).
func (t *tree) branch(id uint64, depth int, table []byte, length uint64) error {
	for i := 0; i < len(table); i += pageElement {
		e := table[i:]
		if !insidePage(i, uint64(binary.LittleEndian.Uint32(e)), uint64(binary.LittleEndian.Uint32(e[4:])), table, length) {
			return corruptPage(id, "a key lies outside of the page")
		}
		if err := t.page(binary.LittleEndian.Uint64(e[8:]), depth+1); err != nil {
			return err
		}
	}
	return nil
}

// leaf checks the elements of a leaf page and the buckets in them. An element consists of flags (4 bytes), position (4)
// and length (4) of the key, and length of the value (4).
func (t *tree) leaf(id uint64, depth int, table []byte, length uint64) error {
	for i := 0; i < len(table); i += pageElement {
		bucket, at, key, value, ok := leafElement(i, table, length)
		if !ok {
			return corruptPage(id, "an element lies outside of the page")
		}
		if !bucket {
			continue
		}
		if value < bucketHeader || value > t.pageSize {
			return corruptPage(id, "a bucket without a header")
		}
		b := make([]byte, value)
		if err := t.read(b, id, at+key); err != nil {
			return err
		}
		if root := binary.LittleEndian.Uint64(b); root != 0 {
			if err := t.page(root, depth+1); err != nil {
				return err
			}
		} else if !inlineLeaf(b[bucketHeader:]) {
			return corruptPage(id, "a malformed inline bucket")
		}
	}
	return nil
}

func leafElement(i int, table []byte, length uint64) (bucket bool, at, key, value uint64, ok bool) {
	e := table[i:]
	position := uint64(binary.LittleEndian.Uint32(e[4:]))
	key, value = uint64(binary.LittleEndian.Uint32(e[8:])), uint64(binary.LittleEndian.Uint32(e[12:]))
	bucket = binary.LittleEndian.Uint32(e)&bucketElement != 0
	return bucket, pageHeader + uint64(i) + position, key, value, insidePage(i, position, key+value, table, length)
}

// inlineLeaf checks the page of an inline bucket, which is part of an element's value. The page must be a leaf without
// nested buckets.
func inlineLeaf(b []byte) bool {
	if len(b) < pageHeader || binary.LittleEndian.Uint16(b[8:]) != leafPage {
		return false
	}
	count := int(binary.LittleEndian.Uint16(b[10:]))
	if pageHeader+count*pageElement > len(b) {
		return false
	}
	table := b[pageHeader : pageHeader+count*pageElement]
	for i := 0; i < len(table); i += pageElement {
		if bucket, _, _, _, ok := leafElement(i, table, uint64(len(b))); !ok || bucket {
			return false
		}
	}
	return true
}
