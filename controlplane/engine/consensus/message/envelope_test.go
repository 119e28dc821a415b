package message

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

func samples() []Envelope {
	return []Envelope{
		{From: 1, To: 2, FromDirID: 11, Kind: KindDirIDRequest},
		{From: 1, To: 2, FromDirID: 11, Kind: KindDirIDRequest, Claim: true},
		{From: 2, To: 1, FromDirID: 22, ToDirID: 11, Kind: KindDirIDResponse, Claim: true, Known: ^uint64(0)},
		{From: 2, To: 1, FromDirID: 22, ToDirID: 11, Kind: KindForward, Group: 300, Term: 7, Life: ^uint64(0), Number: 1 << 40, Payloads: [][]byte{
			append(make([]byte, EntryHeaderBytes), "a=1"...), {}, {7},
		}},
		{From: 1, To: 2, FromDirID: 11, ToDirID: 22, Kind: KindRemoved, Group: 300},
		{From: 1, To: 2, FromDirID: 11, ToDirID: 22, Kind: KindHeartbeats, Heartbeats: []Heartbeat{{1, false, 5, 7, 0}, {300, true, 1 << 40, 0, ^uint64(0)}}},
		{From: 1, To: 2, FromDirID: 11, ToDirID: 22, Kind: KindRefuse, Group: 300, Term: 7, Life: 3, Number: 1, Refusal: RefusedOverloaded},
		{From: 1 << 60, To: 2, FromDirID: ^uint64(0), ToDirID: 22, Kind: KindRaft, Group: 300, Raft: &raftpb.Message{
			Type: raftpb.MsgApp.Enum(), From: new(uint64(1 << 60)), To: new(uint64(2)), Term: new(uint64(5)), Index: new(uint64(7)),
			LogTerm: new(uint64(4)), Commit: new(uint64(6)), Entries: []*raftpb.Entry{entry(8, 5, "hello"), entry(9, 5, "")},
		}},
	}
}

// TestEnvelopeGolden compares the encoding with testdata/envelopes, because members of different versions exchange
// envelopes.
func TestEnvelopeGolden(t *testing.T) {
	var b strings.Builder
	for _, e := range samples() {
		data, err := e.AppendTo(nil)
		require.NoError(t, err)
		fmt.Fprintf(&b, "kind %d %x\n", e.Kind, data)
	}
	golden, err := os.ReadFile("testdata/envelopes")
	require.NoError(t, err)
	require.Equal(t, string(golden), b.String())
}

func TestEnvelopeRoundTrip(t *testing.T) {
	for _, e := range samples() {
		prefix := []byte("before")
		b, err := e.AppendTo(prefix)
		require.NoError(t, err)
		require.Equal(t, "before", string(b[:6]))
		b = b[6:]
		got, err := Parse(b)
		require.NoError(t, err)
		require.True(t, proto.Equal(e.Raft, got.Raft))
		want := e
		want.Raft, got.Raft = nil, nil
		require.Equal(t, want, got)
		for n := range b {
			got, err := Parse(b[:n])
			// A list or a protobuf message that is cut may be a valid shorter one. All other cut envelopes must be
			// errors.
			open := e.Kind == KindRaft || e.Kind == KindForward || e.Kind == KindHeartbeats
			require.True(t, err != nil || open && got.Kind == e.Kind, "%d of %d bytes", n, len(b))
		}
		if e.Kind != KindRaft && e.Kind != KindForward && e.Kind != KindHeartbeats {
			_, err = Parse(append(b, 0))
			require.ErrorContains(t, err, "malformed")
		}
	}
}

func TestBadEnvelopes(t *testing.T) {
	for want, b := range map[string][]byte{
		"the peer speaks version 9, this program version 1": {9, 1, 2, 3},
		"cut short":           {},
		"kind 77 is unknown":  append([]byte{1, 77, 1, 2}, make([]byte, 16)...),
		"is malformed":        append(append([]byte{1, 2, 1, 2}, make([]byte, 16)...), 2),
		"33554433 bytes are ": make([]byte, MaxBytes+1),
	} {
		_, err := Parse(b)
		require.ErrorContains(t, err, want)
	}
	_, err := (&Envelope{Kind: KindRaft}).AppendTo(nil)
	require.ErrorContains(t, err, "no raft message")
	_, err = (&Envelope{Kind: 9}).AppendTo(nil)
	require.ErrorContains(t, err, "kind 9")
	_, err = (&Envelope{Kind: KindRaft, Raft: &raftpb.Message{Context: make([]byte, MaxBytes)}}).AppendTo(nil)
	require.ErrorContains(t, err, "are more than")
}

func FuzzEnvelope(f *testing.F) {
	for _, e := range samples() {
		b, err := e.AppendTo(nil)
		require.NoError(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := Parse(b)
		if err != nil {
			return
		}
		_ = e.Check(1 << 20)
		again, err := e.AppendTo(nil)
		require.NoError(t, err)
		back, err := Parse(again)
		require.NoError(t, err)
		third, err := back.AppendTo(nil)
		require.NoError(t, err)
		require.True(t, bytes.Equal(again, third))
	})
}

func entry(index, term uint64, data string) *raftpb.Entry {
	ent := &raftpb.Entry{Type: raftpb.EntryNormal.Enum(), Index: &index, Term: &term}
	if data != "" {
		ent.Data = []byte(data)
	}
	return ent
}
