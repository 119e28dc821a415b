package consensus

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/klauspost/compress/s2"
	"go.etcd.io/raft/v3/raftpb"
)

// Data of an entry: version, id, and what the version says: one proposal; of each of several its length (uvarint) and
// itself; or the latter compressed (an S2 block).
const (
	payloadVersion = 1
	packVersion    = 2
	denseVersion   = 3
	payloadHeader  = 1 + 16
)

const (
	// packBytes is how large an entry may become by packing.
	packBytes = 64 << 10
	// denseBytes is the size from which a pack is worth a try to compress it, by an eighth at least.
	denseBytes = 512
)

// newEntry encodes the data of an entry with one proposal.
func newEntry(id [16]byte, proposal []byte) []byte {
	data := make([]byte, payloadHeader, payloadHeader+len(proposal))
	data[0] = payloadVersion
	copy(data[1:], id[:])
	return append(data, proposal...)
}

// newBatch returns the data of a batch without proposals, with capacity for a first proposal of room bytes.
func newBatch(id [16]byte, room int) []byte {
	data := make([]byte, payloadHeader, payloadHeader+binary.MaxVarintLen32+room)
	data[0] = packVersion
	copy(data[1:], id[:])
	return data
}

// appendToBatch adds a proposal to the data of a batch that is not closed.
func appendToBatch(data, proposal []byte) []byte {
	data = binary.AppendUvarint(data, uint64(len(proposal)))
	return append(data, proposal...)
}

// closeBatch returns the data of a complete batch: compressed if that saves an eighth at least, otherwise unchanged.
func closeBatch(data []byte) []byte {
	body := data[payloadHeader:]
	if len(body) < denseBytes {
		return data
	}
	dense := make([]byte, payloadHeader+s2.MaxEncodedLen(len(body)))
	n := payloadHeader + len(s2.Encode(dense[payloadHeader:], body))
	if n >= len(data)*7/8 {
		return data
	}
	copy(dense, data[:payloadHeader])
	dense[0] = denseVersion
	return append(make([]byte, 0, n), dense[:n]...) // without spare capacity, because the log's cache keeps the data
}

var (
	errBroken  = errors.New("it is broken")
	errVersion = errors.New("start the version that wrote it")
)

// decodePayload gives the proposals of an entry's data to f, in order. A compressed pack of more than limit bytes is broken.
func decodePayload(data []byte, limit int, f func(proposal []byte)) error {
	if len(data) < payloadHeader {
		return fmt.Errorf("%w: %d bytes", errBroken, len(data))
	}
	b := data[payloadHeader:]
	switch v := data[0]; v {
	case payloadVersion:
		f(b)
		return nil
	case packVersion:
	case denseVersion:
		n, err := s2.DecodedLen(b)
		if err == nil && n > limit {
			err = ErrTooLarge
		}
		if err == nil {
			b, err = s2.Decode(nil, b)
		}
		if err != nil {
			return fmt.Errorf("%w: a compressed pack of %d bytes: %w", errBroken, len(data), err)
		}
	default:
		return fmt.Errorf("it has version %d, this program knows %d to %d only: %w", v, payloadVersion, denseVersion, errVersion)
	}
	for first := true; first || len(b) > 0; first = false {
		n, size := binary.Uvarint(b)
		if size <= 0 || n > uint64(len(b)-size) {
			return fmt.Errorf("%w: a pack of %d bytes", errBroken, len(data))
		}
		f(b[size : size+int(n)])
		b = b[size+int(n):]
	}
	return nil
}

// idOf is the id that an entry was proposed under.
func idOf(ent *raftpb.Entry) (*[16]byte, error) {
	if len(ent.Data) < payloadHeader {
		return nil, fmt.Errorf("entry %d: %w: %d bytes", ent.GetIndex(), errBroken, len(ent.Data))
	}
	return (*[16]byte)(ent.Data[1:payloadHeader]), nil
}

// singleID returns the ID of an entry that holds one proposal. A batch has an ID of the group, and single is false.
func singleID(data []byte) (id [16]byte, single bool) {
	if data[0] != payloadVersion {
		return id, false
	}
	copy(id[:], data[1:])
	return id, true
}

// checkPayload refuses what another member forwards and could not be proposed here: limit is that of one proposal.
func checkPayload(data []byte, limit int) error {
	longest, most := 0, max(binary.MaxVarintLen32+limit, packBytes)
	if err := decodePayload(data, most, func(b []byte) { longest = max(longest, len(b)) }); err != nil {
		return err
	}
	if longest > limit || len(data) > payloadHeader+most {
		return ErrTooLarge
	}
	return nil
}
