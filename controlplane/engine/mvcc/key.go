package mvcc

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// The tables in the Pebble database. The first byte of a key is the table.
//
//	a | lease (8) | key                    attachment of a key to a lease
//	f                                      bytes that Scrub has removed, as Size counts them
//	i | sequence (8)                       proposal IDs with their results, up to that sequence number
//	k | escaped key | 00 01 | ^revision(8) a version of a key, newest first
//	l | lease (8)                          a lease
//	m                                      the state: applied index, revision, compact revision, time
//	n | name                               a named record
//	r | revision (8) [| first change (4)]  a chunk of the change log
const (
	tableAttachments = 'a'
	tableFreed       = 'f'
	tableProposals   = 'i'
	tableKeys        = 'k'
	tableLeases      = 'l'
	tableState       = 'm'
	tableRecords     = 'n'
	tableRevisions   = 'r'
)

const (
	revisionBytes = 8
	// In an escaped key, a zero byte is written as 00 FF, and the end as 00 01. So no escaped key is a prefix of
	// another one, and escaped keys sort as the keys do.
	escapeByte    = 0x00
	escapedZero   = 0xff
	escapedEnd    = 0x01
	newestVersion = math.MaxInt64
)

// appendPrefix appends what the Pebble keys of all versions of key begin with: the table and the escaped key.
func appendPrefix(dst, key []byte) []byte {
	dst = append(dst, tableKeys)
	for {
		i := bytes.IndexByte(key, escapeByte)
		if i < 0 {
			dst = append(dst, key...)
			return append(dst, escapeByte, escapedEnd)
		}
		dst = append(dst, key[:i]...)
		dst = append(dst, escapeByte, escapedZero)
		key = key[i+1:]
	}
}

// prefixLen returns the length of what appendPrefix appends.
func prefixLen(key []byte) int {
	return 1 + len(key) + bytes.Count(key, []byte{escapeByte}) + 2
}

// appendUserKey appends the key that prefix encodes. It is the inverse of appendPrefix.
func appendUserKey(dst, prefix []byte) ([]byte, error) {
	if len(prefix) < 3 || prefix[0] != tableKeys ||
		prefix[len(prefix)-2] != escapeByte || prefix[len(prefix)-1] != escapedEnd {
		return nil, fmt.Errorf("%w: key prefix %x", ErrCorrupt, prefix)
	}
	rest := prefix[1 : len(prefix)-2]
	for {
		i := bytes.IndexByte(rest, escapeByte)
		if i < 0 {
			return append(dst, rest...), nil
		}
		if i+1 >= len(rest) || rest[i+1] != escapedZero {
			return nil, fmt.Errorf("%w: key prefix %x", ErrCorrupt, prefix)
		}
		dst = append(dst, rest[:i+1]...)
		rest = rest[i+2:]
	}
}

// appendRevision appends revision with all bits inverted, so that newer versions sort first.
func appendRevision(dst []byte, revision int64) []byte {
	return binary.BigEndian.AppendUint64(dst, ^uint64(revision))
}

// appendVersionKey appends the Pebble key of the version of key that revision wrote.
func appendVersionKey(dst, key []byte, revision int64) []byte {
	return appendRevision(appendPrefix(dst, key), revision)
}

// splitVersion splits the Pebble key of a version into the prefix, which aliases k, and the revision.
func splitVersion(k []byte) (prefix []byte, revision int64, err error) {
	n := split(k)
	if len(k)-n != revisionBytes {
		return nil, 0, fmt.Errorf("%w: version key %x", ErrCorrupt, k)
	}
	return k[:n:n], int64(^binary.BigEndian.Uint64(k[n:])), nil
}

// changesKey returns the Pebble key of a chunk of the change log. The parameters are the revision of the first change
// in the chunk and the position of this change among the changes of its revision.
func changesKey(revision int64, first int) []byte {
	k := make([]byte, 0, 1+revisionBytes+4)
	k = binary.BigEndian.AppendUint64(append(k, tableRevisions), uint64(revision))
	if first > 0 {
		k = binary.BigEndian.AppendUint32(k, uint32(first))
	}
	return k
}

// splitChangesKey is the inverse of changesKey.
func splitChangesKey(k []byte) (revision int64, first int, err error) {
	switch len(k) {
	case 1 + revisionBytes:
	case 1 + revisionBytes + 4:
		first = int(binary.BigEndian.Uint32(k[1+revisionBytes:]))
	default:
		return 0, 0, fmt.Errorf("%w: revision key %x", ErrCorrupt, k)
	}
	return int64(binary.BigEndian.Uint64(k[1:])), first, nil
}

// proposalsKey returns the Pebble key of an entry of proposal IDs. The parameter last is the sequence number of the
// last ID in the entry.
func proposalsKey(last uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte{tableProposals}, last)
}

// encodedBounds returns the Pebble bounds of the versions of [key, end), where end is as in command.RangeOptions.
func encodedBounds(key, end []byte) (lower, upper []byte) {
	lower = appendPrefix(make([]byte, 0, prefixLen(key)), key)
	switch {
	case len(end) == 0:
		upper = appendSuccessor(nil, lower)
	case command.IsFromKey(end):
		upper = []byte{tableKeys + 1}
	default:
		upper = appendPrefix(make([]byte, 0, prefixLen(end)), end)
	}
	return lower, upper
}

// comparer returns a Pebble comparer that orders keys by their bytes, and tells Pebble where a version's revision
// begins. With that, Pebble has bloom filters over keys, skips old versions cheaply, and moves old values out of the
// way of scans.
func comparer() *pebble.Comparer {
	c := *pebble.DefaultComparer
	c.Name = "trivet.mvcc.1"
	c.Split = split
	c.ImmediateSuccessor = appendSuccessor
	c.Separator = func(dst, a, b []byte) []byte {
		// Shorten only the part before the revision. If the revision were cut, split would divide the result at another
		// place than the neighbouring keys.
		n, pa := len(dst), a[:split(a)]
		dst = pebble.DefaultComparer.Separator(dst, pa, b[:split(b)])
		if bytes.Equal(dst[n:], pa) {
			return append(dst[:n], a...)
		}
		return dst
	}
	c.Successor = func(dst, a []byte) []byte { return append(dst, a...) }
	return &c
}

// split returns the length of k without the revision. Only the keys of versions have a revision; it follows the bytes
// 00 01, which cannot occur inside an escaped key.
func split(k []byte) int {
	n := len(k) - revisionBytes
	if n >= 3 && k[0] == tableKeys && k[n-2] == escapeByte && k[n-1] == escapedEnd {
		return n
	}
	return len(k)
}

// appendSuccessor appends the smallest possible prefix that sorts after the prefix a and after all versions of a.
func appendSuccessor(dst, a []byte) []byte {
	dst = append(dst, a...)
	if n := len(a); n >= 3 && a[0] == tableKeys && a[n-2] == escapeByte && a[n-1] == escapedEnd {
		dst[len(dst)-1]++
		return dst
	}
	return append(dst, 0)
}
