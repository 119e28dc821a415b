package mvcc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// TestScripts runs the scripts in testdata/scripts and compares the engine's results with those in the files. After an
// intended change, run it with -rewrite.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		s := newScript(t)
		datadriven.RunTest(t, path, s.run)
	})
}

// script is the engine of one script and the log of its commands, which are applied again after a crash.
type script struct {
	t        *testing.T
	fs       *vfs.MemFS
	e        *Engine
	log      []command.Command
	watchers map[string]*watch.Watcher
	snaps    map[string]*Snapshot
}

func newScript(t *testing.T) *script {
	s := &script{t: t, fs: vfs.NewCrashableMem(), watchers: map[string]*watch.Watcher{}, snaps: map[string]*Snapshot{}}
	s.open()
	t.Cleanup(func() { require.NoError(t, s.e.Close()) })
	return s
}

func (s *script) open() {
	e, err := Open(s.fs, "data", Options{})
	require.NoError(s.t, err)
	s.e = e
}

func (s *script) apply(id [16]byte, data []byte) string {
	c := command.Command{Index: uint64(len(s.log)) + 1, Term: 1, ID: id, Data: data}
	s.log = append(s.log, c)
	r, err := s.e.Apply([]command.Command{c})
	if err != nil {
		return fmt.Sprintf("error: %v\n", err)
	}
	return formatResult(r[0])
}

func formatResult(r command.Result) string {
	out := fmt.Sprintf("revision %d", r.Revision)
	if r.Conflict {
		out += fmt.Sprintf(", guard %d failed", r.FailedGuard)
	}
	if err := r.Err(); err != nil {
		out += ", refused: " + err.Error()
	}
	return out + "\n"
}

func formatKV(kv KV) string {
	out := fmt.Sprintf("%s=%s create %d mod %d version %d",
		show(kv.Key), kv.Value, kv.CreateRevision, kv.ModRevision, kv.Version)
	if kv.Lease != 0 {
		out += fmt.Sprintf(" lease %d", kv.Lease)
	}
	return out
}

// show writes a key as in scripts, where `\0` is the zero byte.
func show(key []byte) string { return strings.ReplaceAll(string(key), "\x00", `\0`) }

func key(s string) []byte { return []byte(strings.ReplaceAll(s, `\0`, "\x00")) }

func end(s string) []byte {
	if s == "" {
		return nil
	}
	return key(s)
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	switch d.Cmd {
	case "txn":
		return s.txn(d)
	case "program":
		return s.program(d)
	case "leases":
		return s.leases()
	case "records":
		return s.records()
	case "hash":
		h, err := s.e.HashKV(context.Background(), int64(number(d, "revision")))
		if err != nil {
			return fmt.Sprintf("error: %v\n", err)
		}
		return fmt.Sprintf("%08x up to %d of %d, floor %d\n", h.Hash, h.Revision, h.Current, h.CompactRevision)
	case "size":
		return fmt.Sprintf("%d, in use %d\n", s.e.Size(), s.e.SizeInUse())
	case "compact":
		return s.apply([16]byte{}, command.EncodeCompact(int64(number(d, "revision"))))
	case "get":
		return s.read(d, func(snap *Snapshot) string { return s.get(d, snap) })
	case "range":
		return s.read(d, func(snap *Snapshot) string { return s.rangeKeys(d, snap) })
	case "snapshot":
		s.snaps[word(d, "name")] = s.e.Snapshot()
		return ""
	case "close-snapshot":
		s.snaps[word(d, "name")].Close()
		return ""
	case "watch":
		s.watchers[word(d, "name")] = s.e.Watch(watch.Options{
			Key: key(word(d, "key")), End: end(word(d, "end")), FromRevision: int64(number(d, "from")),
			PrevKV: d.HasArg("prev"), MaxEvents: number(d, "max"),
		})
		return ""
	case "next":
		return s.next(d)
	case "close":
		s.watchers[word(d, "name")].Close()
		return ""
	case "scrub":
		limit := number(d, "limit")
		if limit == 0 {
			limit = 1000
		}
		done, err := s.e.Scrub(context.Background(), limit)
		require.NoError(t, err)
		return fmt.Sprintf("done %v\n", done)
	case "flush":
		p, err := s.e.Flush(context.Background())
		require.NoError(t, err)
		return fmt.Sprintf("durable up to index %d\n", p.Index)
	case "crash":
		return s.crash()
	case "checkpoint":
		p, err := s.e.Checkpoint(context.Background(), word(d, "name"))
		if err != nil {
			return fmt.Sprintf("error: %v\n", err)
		}
		return fmt.Sprintf("at index %d\n", p.Index)
	case "restore":
		if err := s.e.Restore(word(d, "name")); err != nil {
			return fmt.Sprintf("error: %v\n", err)
		}
		return fmt.Sprintf("at index %d\n", s.e.Applied().Index)
	case "stats":
		v := s.e.Stats()
		return fmt.Sprintf("index %d revision %d floor %d time %d keys %d watchers %d\n",
			v.Applied.Index, v.Revision, v.CompactRevision, v.Time, v.Keys, v.Watchers)
	case "dump":
		return dump(t, s.e)
	}
	return fmt.Sprintf("unknown command %s\n", d.Cmd)
}

func (s *script) txn(d *datadriven.TestData) string {
	txn := command.Txn{Time: int64(number(d, "time"))}
	for _, line := range strings.Split(d.Input, "\n") {
		f := append(strings.Fields(line), "", "", "", "")
		switch f[0] {
		case "unchanged":
			mod, _ := strconv.ParseInt(f[2], 10, 64)
			txn.Guards = append(txn.Guards, command.Guard{Key: key(f[1]), ModRevision: mod})
		case "unchanged-range":
			mod, _ := strconv.ParseInt(f[3], 10, 64)
			count, _ := strconv.ParseInt(f[4], 10, 64)
			txn.Guards = append(txn.Guards, command.Guard{Key: key(f[1]), End: end(f[2]), ModRevision: mod, Count: count})
		case "put":
			txn.Ops = append(txn.Ops, command.Put(key(f[1]), []byte(f[2])))
		case "delete":
			txn.Ops = append(txn.Ops, command.Delete(key(f[1])))
		case "delete-range":
			txn.Ops = append(txn.Ops, command.DeleteRange(key(f[1]), end(f[2])))
		}
	}
	data, err := command.EncodeTxn(txn)
	if err != nil {
		return fmt.Sprintf("invalid: %v\n", err)
	}
	var id [16]byte
	copy(id[:], word(d, "id"))
	return s.apply(id, data)
}

// read calls f with the snapshot that the argument at= of d names, or with a new one.
func (s *script) read(d *datadriven.TestData, f func(*Snapshot) string) string {
	if snap := s.snaps[word(d, "at")]; snap != nil {
		return f(snap)
	}
	snap := s.e.Snapshot()
	defer snap.Close()
	return f(snap)
}

func (s *script) get(d *datadriven.TestData, snap *Snapshot) string {
	kv, ok, err := snap.Get(key(word(d, "key")))
	switch {
	case err != nil:
		return fmt.Sprintf("error: %v\n", err)
	case !ok:
		return "absent\n"
	}
	return formatKV(kv) + "\n"
}

func (s *script) rangeKeys(d *datadriven.TestData, snap *Snapshot) string {
	o := RangeOptions{
		Key: key(word(d, "key")), End: end(word(d, "end")), Revision: int64(number(d, "revision")),
		Limit: number(d, "limit"), MaxBytes: number(d, "bytes"), Reverse: d.HasArg("reverse"),
		KeysOnly: d.HasArg("keys-only"), WantCount: d.HasArg("count"), CountOnly: d.HasArg("count-only"),
	}
	res, err := snap.Range(o)
	var compacted *CompactedError
	if errors.As(err, &compacted) {
		return fmt.Sprintf("error: %v\n", compacted)
	}
	if err != nil {
		return fmt.Sprintf("error: %v\n", err)
	}
	var b strings.Builder
	for _, kv := range res.KVs {
		fmt.Fprintln(&b, formatKV(kv))
	}
	fmt.Fprintf(&b, "count %d, highest mod %d", res.Count, res.MaxModRevision)
	if res.More {
		b.WriteString(", more")
	}
	if d.HasArg("guard") {
		g := o.Guard(res)
		fmt.Fprintf(&b, ", guard [%s, %s) mod %d count %d", show(g.Key), show(g.End), g.ModRevision, g.Count)
	}
	return b.String() + "\n"
}

// next returns the text of all batches that a watcher can return without waiting.
func (s *script) next(d *datadriven.TestData) string {
	w := s.watchers[word(d, "name")]
	ready, cancel := context.WithCancel(context.Background())
	cancel()
	var b strings.Builder
	for {
		batch, err := w.Next(ready)
		if errors.Is(err, context.Canceled) {
			fmt.Fprintf(&b, "seen all up to %d\n", w.Progress())
			return b.String()
		}
		if err != nil {
			fmt.Fprintf(&b, "error: %v\n", err)
			return b.String()
		}
		for _, e := range batch.Events {
			b.WriteString(formatEvent(e))
		}
		fmt.Fprintf(&b, "-- complete up to %d", batch.Revision)
		if batch.Partial {
			b.WriteString(", the revision goes on")
		}
		b.WriteString("\n")
	}
}

func formatEvent(e watch.Event) string {
	out := "put " + formatKV(e.KV)
	if e.Type == watch.EventDelete {
		out = fmt.Sprintf("delete %s mod %d", show(e.KV.Key), e.KV.ModRevision)
	}
	out += fmt.Sprintf(", before %d", e.PrevModRevision)
	if e.Prev != nil {
		out += " " + formatKV(*e.Prev)
	}
	return out + "\n"
}

func (s *script) leases() string {
	snap := s.e.Snapshot()
	defer snap.Close()
	all, err := snap.Leases()
	require.NoError(s.t, err)
	var b strings.Builder
	for _, l := range all {
		keys, err := snap.LeaseKeys(l.ID)
		require.NoError(s.t, err)
		fmt.Fprintf(&b, "lease %d of %d s: %s\n", l.ID, l.TTL, bytes.Join(keys, []byte(" ")))
	}
	return b.String()
}

func (s *script) records() string {
	snap := s.e.Snapshot()
	defer snap.Close()
	var b strings.Builder
	fmt.Fprintf(&b, "epoch %d\n", snap.Epoch())
	for _, r := range snap.Records(nil) {
		fmt.Fprintf(&b, "%s=%s\n", r.Name, r.Value)
	}
	return b.String()
}

// crash loses unflushed data, opens the engine again and applies the lost commands of the log again.
func (s *script) crash() string {
	s.fs = s.fs.CrashClone(vfs.CrashCloneCfg{})
	require.NoError(s.t, s.e.Close())
	s.open()
	from := s.e.Applied().Index
	if replay := s.log[from:]; len(replay) > 0 {
		_, err := s.e.Apply(replay)
		require.NoError(s.t, err)
	}
	return fmt.Sprintf("opened at index %d, replayed up to %d\n", from, s.e.Applied().Index)
}

// dump returns the stored keys and values of e as text.
func dump(t *testing.T, e *Engine) string {
	var b strings.Builder
	it, err := e.published.Load().gen.db.NewIter(&pebble.IterOptions{})
	require.NoError(t, err)
	for ok := it.First(); ok; ok = it.Next() {
		k, v := it.Key(), it.Value()
		switch k[0] {
		case tableKeys:
			prefix, revision, err := splitVersion(k)
			require.NoError(t, err)
			user, err := appendUserKey(nil, prefix)
			require.NoError(t, err)
			ver, value, err := decodeVersion(v, revision)
			require.NoError(t, err)
			if ver.Live() {
				fmt.Fprintf(&b, "key %s revision %d: %s\n", show(user), revision, value)
			} else {
				fmt.Fprintf(&b, "key %s revision %d: deleted\n", show(user), revision)
			}
		case tableRevisions:
			l, err := newChunkReader(k, v)
			require.NoError(t, err)
			for {
				c, ok, err := l.next()
				require.NoError(t, err)
				if !ok {
					break
				}
				what := "put"
				if c.deleted {
					what = "delete"
				}
				if l.ordinal == 0 {
					fmt.Fprintf(&b, "revision %d:\n", c.revision)
				}
				fmt.Fprintf(&b, "  %s %s after %d releases %d", what, show(c.key), c.prevModRevision, c.freedBytes)
				if c.superseded {
					fmt.Fprintf(&b, ", passing %s", c.value)
				}
				b.WriteString("\n")
			}
		case tableAttachments:
			fmt.Fprintf(&b, "lease %d key %s\n", binary.BigEndian.Uint64(k[1:]), show(k[9:]))
		case tableLeases:
			l, err := decodeLease(k, v)
			require.NoError(t, err)
			fmt.Fprintf(&b, "lease %d of %d s\n", l.ID, l.TTL)
		case tableRecords:
			fmt.Fprintf(&b, "record %s: %s\n", k[1:], v)
		}
	}
	require.NoError(t, it.Close())
	return b.String()
}

func word(d *datadriven.TestData, name string) string {
	for _, a := range d.CmdArgs {
		if a.Key == name && len(a.Vals) > 0 {
			return a.Vals[0]
		}
	}
	return ""
}

func number(d *datadriven.TestData, name string) int {
	w := word(d, name)
	if w == "" {
		return 0
	}
	n, err := strconv.Atoi(w)
	if err != nil {
		d.Fatalf(nil, "%s=%s is no number", name, w)
	}
	return n
}
