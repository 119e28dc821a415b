package show

import (
	"bytes"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

func TestTableIsAlignedWithoutControlCharacters(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, Rows(&b, []string{"NAME", "STATE", "ERROR"}, [][]string{
		{"web", "RUNNING", ""},
		{"größe", "ERROR", "gone\n\x1b[2J\u202e\xff"},
	}))
	require.Equal(t, "NAME   STATE    ERROR\nweb    RUNNING  -\ngröße  ERROR    gone\\n\\x1b[2J\\u202e\ufffd\n", b.String())
}

func TestFields(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, Fields(&b, [][2]string{{"Name", "web"}, {"Last error", ""}}))
	require.Equal(t, "Name:        web\nLast error:  -\n", b.String())
}

func TestWords(t *testing.T) {
	now := time.UnixMilli(1_000_000_000_000)
	ago := func(d time.Duration) string { return Age(now, now.Add(-d).UnixMilli()) }
	for _, tc := range [][2]string{
		{Age(now, 0), ""}, {ago(-time.Hour), "0s"}, {ago(119 * time.Second), "119s"}, {ago(2 * time.Minute), "2m"},
		{ago(2 * time.Hour), "2h"}, {ago(49 * time.Hour), "2d"},
		{In(now, 0), ""}, {In(now, now.Add(49*time.Hour).UnixMilli()), "in 2d"}, {In(now, now.UnixMilli()), "expired"},
		{Shorten("größe", 0), "größe"}, {Shorten("größe", 5), "größe"}, {Shorten("größer", 5), "größ…"},
		{When(0), ""}, {When(1_000_000_000_000), "2001-09-09T01:46:40Z"},
		{Bytes(0), "0 B"}, {Bytes(1023), "1023 B"}, {Bytes(1 << 20), "1 MiB"}, {Bytes(3 << 29), "1.5 GiB"}, {Bytes(1 << 63), "8192 PiB"},
		{Enum("VM_STATE", vmv1.VmState_VM_STATE_RUNNING), "RUNNING"}, {Enum("VM_STATE", vmv1.VmState(0)), ""},
		{Enum("VM_STATE", vmv1.VmState(77)), "77"},
	} {
		require.Equal(t, tc[1], tc[0])
	}
}

func TestProgressAppearsAfterASecondAndIsErased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		p := Start(&b, "starting web")
		time.Sleep(900 * time.Millisecond)
		p.End()
		require.Empty(t, b.String())

		p = Start(&b, "starting web")
		time.Sleep(1500 * time.Millisecond)
		p.Say("still\x1b starting")
		time.Sleep(time.Second)
		p.End()
		time.Sleep(time.Second) // nothing may be shown after the end
		shown := b.String()
		require.Contains(t, shown, "starting web")
		require.Contains(t, shown, `still\x1b starting`)
		require.True(t, strings.HasSuffix(shown, "\x1b[2K\r"), "the line must be erased: %q", shown[max(len(shown)-20, 0):])
	})
}

// TestNoProgressWithoutATerminal checks that Start with a nil writer starts no goroutine that writes a status line.
func TestNoProgressWithoutATerminal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := Start(nil, "starting web")
		require.Nil(t, p.timer, "a status line runs without a terminal")
		p.Say("still")
		time.Sleep(2 * time.Second) // a write to the nil writer would panic
		p.End()
	})
}

func TestBar(t *testing.T) {
	require.Equal(t, "[                        ] 0 % of 100 B", Bar(0, 100))
	require.Equal(t, "[############            ] 50 % of 100 B", Bar(50, 100))
	require.Equal(t, "[########################] 100 % of 100 B", Bar(120, 100))
	require.Equal(t, "5 B", Bar(5, 0))
}

// TestWrapRows checks that the last cell is broken between words, so that no line is longer than MaxWidth.
func TestWrapRows(t *testing.T) {
	var b strings.Builder
	rows := [][]string{{"source", strings.Repeat("word ", 30)}, {"", "a\nb"}}
	require.NoError(t, WrapRows(&b, Table, []string{"STAGE", "TEXT"}, rows))
	five := strings.TrimSpace(strings.Repeat("word ", 14))
	require.Equal(t, "STAGE   TEXT\nsource  "+five+"\n        "+five+"\n        word word\n-       a b\n", b.String())
	b.Reset()
	require.NoError(t, WrapRows(&b, Wide, []string{"STAGE", "TEXT"}, rows[:1]))
	require.Len(t, strings.Split(b.String(), "\n"), 3)
}

// TestUsed checks that a unit that both amounts have is written once.
func TestUsed(t *testing.T) {
	for want, n := range map[string][2]uint64{
		"1.5/64 GiB": {3 << 29, 64 << 30}, "512 MiB/7 GiB": {512 << 20, 7 << 30}, "0/7 GiB": {0, 7 << 30}, "0/0 B": {0, 0},
	} {
		require.Equal(t, want, Used(n[0], n[1]))
	}
}
