package consensus

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// TestMalformedMessagesAreDropped checks that Step drops and logs messages on which raft would panic.
func TestMalformedMessagesAreDropped(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	f := c.others(l)[0]
	for i, m := range []*raftpb.Message{
		nil,
		{},
		{Type: raftpb.MsgProp.Enum(), Entries: []*raftpb.Entry{{Data: []byte("x")}}},
		{Type: raftpb.MsgHup.Enum()},
		{Type: raftpb.MsgTransferLeader.Enum(), Term: &l.group.term},
		{Type: raftpb.MsgForgetLeader.Enum(), Term: &l.group.term},
		{Type: raftpb.MsgStorageAppend.Enum(), Term: &l.group.term},
		{Type: raftpb.MsgHeartbeat.Enum()},
		{Type: raftpb.MsgReadIndex.Enum()},
		{Type: raftpb.MsgHeartbeatResp.Enum(), Term: &l.group.term, Context: []byte{1}},
		{Type: raftpb.MsgApp.Enum(), Term: &l.group.term, Entries: []*raftpb.Entry{entry(9, 1, "x")}},
		{Type: raftpb.MsgApp.Enum(), Term: &l.group.term, Entries: []*raftpb.Entry{nil}},
		{Type: raftpb.MsgApp.Enum(), Term: &l.group.term, Entries: []*raftpb.Entry{entry(1, 99, "x")}},
	} {
		if m != nil {
			m.From, m.To = &f.id, &l.id
		}
		before := l.group.Status()
		require.NoError(t, l.host.Step(message.Envelope{From: f.id, To: l.id, FromDirID: f.host.dirIDs.own, Kind: message.KindRaft, Group: testGroup, Raft: m}), "message %d", i)
		c.settle()
		require.Equal(t, before, l.group.Status(), "message %d", i)
	}
	require.Equal(t, 13, countLines(l.logged.String(), "dropped a malformed message"), fmt.Sprint(l.logged.String()))
	c.put(l, "a=1")
}

func entry(index, term uint64, data string) *raftpb.Entry {
	ent := &raftpb.Entry{Type: raftpb.EntryNormal.Enum(), Index: &index, Term: &term}
	if data != "" {
		ent.Data = []byte(data)
	}
	return ent
}
