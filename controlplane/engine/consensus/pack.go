package consensus

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/klauspost/compress/s2"
	"go.etcd.io/raft/v3/raftpb"
)

// Proposals without an id that come in the same tick and wait together become one entry, a pack: what an entry costs
// beside its data, in raft, in the log and on the wire, is paid once for all of them. The members that a pack is for see
// its proposals one by one, in their order, with one index. A pack is decided, lost, sent and found again as a whole, by
// an id that the group makes for it. What is like other things in it is written once: a pack is compressed, quickly, if
// that makes it much smaller.

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

// pack makes a proposal part of the last pack that waits, or of a new one.
func (g *Group) pack(data []byte, done func(Result, error)) {
	deadline := g.host.now + g.host.opts.Limits.ProposalTicks
	var p *proposal
	if n := len(g.queue); n > 0 {
		p = g.queue[n-1]
	}
	if p == nil || p.parts == nil || p.sealed || p.deadline != deadline || len(p.data)+len(data) > packBytes {
		p = g.newPack(deadline, len(data))
		g.queue = append(g.queue, p)
	}
	before := len(p.data)
	p.data = binary.AppendUvarint(p.data, uint64(len(data)))
	p.data = append(p.data, data...)
	p.parts = append(p.parts, done)
	size := uint64(len(p.data) - before)
	p.size += size
	g.proposalBytes += size
	g.waiting += size
	g.host.schedule(g)
}

func (g *Group) newPack(deadline uint64, room int) *proposal {
	g.packs++
	p := &proposal{deadline: deadline, data: make([]byte, payloadHeader, payloadHeader+binary.MaxVarintLen32+room)}
	binary.LittleEndian.PutUint64(p.id[:], g.host.nonce)
	binary.LittleEndian.PutUint64(p.id[8:], g.packs)
	p.data[0] = packVersion
	copy(p.data[1:], p.id[:])
	return p
}

// seal ends a pack: no more proposals come to it.
func (p *proposal) seal() {
	if p.parts == nil || p.sealed {
		return
	}
	p.sealed = true
	body := p.data[payloadHeader:]
	if len(body) < denseBytes {
		return
	}
	dense := make([]byte, payloadHeader+s2.MaxEncodedLen(len(body)))
	n := payloadHeader + len(s2.Encode(dense[payloadHeader:], body))
	if n < len(p.data)*7/8 {
		copy(dense, p.data[:payloadHeader])
		dense[0] = denseVersion
		p.data = append(make([]byte, 0, n), dense[:n]...) // the log keeps it for a while
	}
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

// entriesOf appends the proposals of a raft entry, as the state machine shall see them.
func entriesOf(list []Entry, ent *raftpb.Entry) ([]Entry, error) {
	first := len(list)
	err := decodePayload(ent.Data, MaxEnvelopeBytes, func(b []byte) {
		list = append(list, Entry{Index: ent.GetIndex(), Term: ent.GetTerm(), Data: b})
	})
	if err != nil {
		return list, fmt.Errorf("entry %d: %w", ent.GetIndex(), err)
	}
	if ent.Data[0] == payloadVersion {
		copy(list[first].ID[:], ent.Data[1:])
	}
	return list, nil
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
