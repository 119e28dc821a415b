package message

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/klauspost/compress/s2"
	"go.etcd.io/raft/v3/raftpb"
)

// The data of a raft entry is a version byte, an ID of 16 bytes and a body. The version byte says which format the body
// has.
const (
	singleVersion     = 1 // the body is one proposal
	batchVersion      = 2 // the body is, for each proposal, its length (uvarint) and its bytes
	compressedVersion = 3 // the body of batchVersion, compressed as an S2 block

	// EntryHeaderBytes is the size in bytes of what precedes the body: the version byte and the ID.
	EntryHeaderBytes = 1 + 16
)

const (
	// MaxBatchBytes is the maximum size in bytes of a batch with more than one proposal, before compression.
	MaxBatchBytes = 64 << 10
	// compressBytes is the minimum size in bytes of a body for which CloseBatch tries compression.
	compressBytes = 512
)

// NewEntry returns the data of a raft entry that contains one proposal with the given ID.
func NewEntry(id [16]byte, proposal []byte) []byte {
	data := make([]byte, EntryHeaderBytes, EntryHeaderBytes+len(proposal))
	data[0] = singleVersion
	copy(data[1:], id[:])
	return append(data, proposal...)
}

// NewBatch returns the data of a batch with the given ID and without proposals. Its capacity suffices for a first
// proposal of room bytes.
func NewBatch(id [16]byte, room int) []byte {
	data := make([]byte, EntryHeaderBytes, EntryHeaderBytes+binary.MaxVarintLen32+room)
	data[0] = batchVersion
	copy(data[1:], id[:])
	return data
}

// AppendToBatch appends a proposal to data and returns the extended slice. data is a batch for which CloseBatch was not
// called yet.
func AppendToBatch(data, proposal []byte) []byte {
	data = binary.AppendUvarint(data, uint64(len(proposal)))
	return append(data, proposal...)
}

// CloseBatch returns the final data of a batch. The data is compressed if that saves at least an eighth of its size,
// otherwise unchanged. No proposal may be appended afterwards.
func CloseBatch(data []byte) []byte {
	body := data[EntryHeaderBytes:]
	if len(body) < compressBytes {
		return data
	}
	dense := make([]byte, EntryHeaderBytes+s2.MaxEncodedLen(len(body)))
	n := EntryHeaderBytes + len(s2.Encode(dense[EntryHeaderBytes:], body))
	if n >= len(data)*7/8 {
		return data
	}
	copy(dense, data[:EntryHeaderBytes])
	dense[0] = compressedVersion
	return append(make([]byte, 0, n), dense[:n]...) // without spare capacity, because the log caches the data
}

var (
	// ErrTooLarge is returned for a proposal or a batch that exceeds a limit.
	ErrTooLarge = errors.New("the proposal is too large")
	// ErrMalformed is returned for data that is not a valid entry.
	ErrMalformed = errors.New("the data is malformed")
	errVersion   = errors.New("start the version that wrote it")
)

// DecodeEntry calls f with each proposal of an entry's data, in order. It returns ErrMalformed for malformed data and
// for a batch that decompresses to more than limit bytes.
func DecodeEntry(data []byte, limit int, f func(proposal []byte)) error {
	if len(data) < EntryHeaderBytes {
		return fmt.Errorf("%w: %d bytes", ErrMalformed, len(data))
	}
	b := data[EntryHeaderBytes:]
	switch v := data[0]; v {
	case singleVersion:
		f(b)
		return nil
	case batchVersion:
	case compressedVersion:
		n, err := s2.DecodedLen(b)
		if err == nil && n > limit {
			err = ErrTooLarge
		}
		if err == nil {
			b, err = s2.Decode(nil, b)
		}
		if err != nil {
			return fmt.Errorf("%w: a compressed batch of %d bytes: %w", ErrMalformed, len(data), err)
		}
	default:
		return fmt.Errorf("the data has version %d, this program knows %d to %d only: %w", v, singleVersion, compressedVersion, errVersion)
	}
	for first := true; first || len(b) > 0; first = false {
		n, size := binary.Uvarint(b)
		if size <= 0 || n > uint64(len(b)-size) {
			return fmt.Errorf("%w: a batch of %d bytes", ErrMalformed, len(data))
		}
		f(b[size : size+int(n)])
		b = b[size+int(n):]
	}
	return nil
}

// EntryID returns the ID in the header of an entry, which is the ID of its only proposal or of its batch. The result
// points into the entry's data.
func EntryID(ent *raftpb.Entry) (*[16]byte, error) {
	if len(ent.Data) < EntryHeaderBytes {
		return nil, fmt.Errorf("entry %d: %w: %d bytes", ent.GetIndex(), ErrMalformed, len(ent.Data))
	}
	return (*[16]byte)(ent.Data[1:EntryHeaderBytes]), nil
}

// SingleID returns the ID of the proposal if the entry contains a single one. For a batch, single is false.
func SingleID(data []byte) (id [16]byte, single bool) {
	if data[0] != singleVersion {
		return id, false
	}
	copy(id[:], data[1:])
	return id, true
}

// checkEntry checks the data of an entry that another member has forwarded. It returns an error if the data is
// malformed or contains a proposal of more than limit bytes.
func checkEntry(data []byte, limit int) error {
	longest, most := 0, max(binary.MaxVarintLen32+limit, MaxBatchBytes)
	if err := DecodeEntry(data, most, func(b []byte) { longest = max(longest, len(b)) }); err != nil {
		return err
	}
	if longest > limit || len(data) > EntryHeaderBytes+most {
		return ErrTooLarge
	}
	return nil
}
