package raftconf

import (
	"encoding/binary"
	"errors"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/internal/codec"
)

// changeVersion is the first byte of the context of a membership change (raftpb.ConfChangeV2.Context).
const changeVersion = 1

// AppendChange appends to b the context of a membership change (raftpb.ConfChangeV2.Context): a token, which is a
// random number that identifies the proposal, and the data-directory ID of each added member.
func AppendChange(b []byte, token uint64, dirIDs map[uint64]uint64) []byte {
	b = append(b, changeVersion)
	b = binary.LittleEndian.AppendUint64(b, token)
	return AppendDirIDs(b, dirIDs)
}

// ParseChange decodes the membership change and its context from an entry. The token is 0 if the entry has no context,
// which is so for the entry with which raft leaves a joint configuration.
func ParseChange(ent *raftpb.Entry) (cc *raftpb.ConfChangeV2, token uint64, dirIDs map[uint64]uint64, err error) {
	cc = &raftpb.ConfChangeV2{}
	if ent.GetType() != raftpb.EntryConfChangeV2 {
		return nil, 0, nil, fmt.Errorf("%s is not known to this version", ent.GetType())
	}
	if err := proto.Unmarshal(ent.Data, cc); err != nil {
		return nil, 0, nil, err
	}
	if len(cc.Context) == 0 {
		return cc, 0, nil, nil
	}
	if cc.Context[0] != changeVersion {
		return nil, 0, nil, fmt.Errorf("version %d is not known to this program: start the version that wrote it", cc.Context[0])
	}
	r := codec.Reader{Rest: cc.Context[1:]}
	token, dirIDs = r.Fixed64(), ReadDirIDs(&r)
	if r.Short || r.Malformed || len(r.Rest) > 0 {
		return nil, 0, nil, errors.New("the context of the change is malformed")
	}
	return cc, token, dirIDs, nil
}
