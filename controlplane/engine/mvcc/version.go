package mvcc

import (
	"encoding/binary"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// The first byte of a stored version is its kind.
const (
	recordTombstone = 0
	recordValue     = 1
	recordLeased    = 2 // a value, whose key has a lease
)

// versionBytes is the number of bytes that Size counts for each version besides its key and value.
const versionBytes = 32

// storedBytes returns the size, as Size counts it, of a version of key with metadata m.
func storedBytes(key []byte, m command.Meta) int64 { return versionBytes + int64(len(key)) + m.Size }

const maxVersionHeader = 1 + 3*binary.MaxVarintLen64

// appendVersionHeader appends the header of a stored version, which precedes the value: its kind and metadata.
func appendVersionHeader(dst []byte, v command.Meta) []byte {
	kind := byte(recordValue)
	if v.Lease != 0 {
		kind = recordLeased
	}
	dst = append(dst, kind)
	dst = binary.AppendUvarint(dst, uint64(v.ModRevision-v.CreateRevision))
	dst = binary.AppendUvarint(dst, uint64(v.Version))
	if v.Lease != 0 {
		dst = binary.AppendUvarint(dst, uint64(v.Lease))
	}
	return dst
}

// decodeVersion decodes a stored version that the revision mod wrote. For a tombstone it returns the zero Meta. The
// value aliases b.
func decodeVersion(b []byte, mod int64) (command.Meta, []byte, error) {
	d := command.FieldDecoder{Rest: b}
	switch kind := d.Byte(); kind {
	case recordTombstone:
		if d.Err != nil || len(d.Rest) > 0 {
			return command.Meta{}, nil, fmt.Errorf("%w: tombstone at revision %d", ErrCorrupt, mod)
		}
		return command.Meta{}, nil, nil
	case recordValue, recordLeased:
		age, v := d.Int64(), command.Meta{ModRevision: mod, Version: d.Int64()}
		if kind == recordLeased {
			v.Lease = int64(d.Uint64())
		}
		if d.Err != nil || age >= mod || v.Version == 0 || (kind == recordLeased) != (v.Lease != 0) {
			return command.Meta{}, nil, fmt.Errorf("%w: version at revision %d", ErrCorrupt, mod)
		}
		v.CreateRevision, v.Size = mod-age, int64(len(d.Rest))
		return v, d.Rest, nil
	default:
		return command.Meta{}, nil, fmt.Errorf("version at revision %d of kind %d: %w", mod, kind, command.ErrUnknownFormat)
	}
}
