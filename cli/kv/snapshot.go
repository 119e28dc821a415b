package kv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"

	"github.com/spf13/cobra"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	"github.com/trivet-cloud/trivet/controlplane/kv/snapfile"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
)

func snapshotCommand(n *kvSession) *cobra.Command {
	c := &cobra.Command{Use: "snapshot", Short: "Save the keys to a file", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
	c.AddCommand(saveCommand(n))
	return c
}

// snapshotFacts is the result of `trivet kv snapshot save`.
type snapshotFacts struct {
	File     string `json:"file"`
	Bytes    int64  `json:"bytes"`
	Revision int64  `json:"revision"`
	Keys     int64  `json:"keys"`
}

func saveCommand(n *kvSession) *cobra.Command {
	c := &cobra.Command{
		Use: "save FILE", Short: "Save all keys to a file for etcdutl or trivet kv import",
		Long: `Save all keys, leases and users at one revision to a file. An interrupted command leaves no file. etcdutl can
restore the file to an etcd cluster, and trivet kv import loads its keys.`,
		Args: session.Exactly("FILE"),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveDefault
		},
	}
	c.RunE = n.run(0, func(ctx context.Context, c *client, args []string) error {
		var facts snapshotFacts
		err := n.Wait("saving the snapshot", func(say func(string)) (err error) {
			facts, err = c.save(ctx, args[0], say)
			return err
		})
		if err != nil {
			return err
		}
		return n.print(facts, []string{facts.File}, func(w io.Writer) error {
			return show.Fields(w, [][2]string{
				{"File", facts.File}, {"Size", show.Bytes(uint64(facts.Bytes))}, {"Revision", number(facts.Revision)}, {"Keys", number(facts.Keys)},
			})
		})
	})
	return c
}

// save receives a snapshot and verifies it in a temporary file. After that, it renames the file to path. save calls say
// to change the text of the status line.
func (c *client) save(ctx context.Context, path string, say func(string)) (facts snapshotFacts, err error) {
	facts.File = path
	err = atomicfile.Write(path, 0o600, func(f *os.File) (err error) {
		if facts.Bytes, err = c.receive(ctx, f, say); err != nil {
			return err
		}
		say("checking the snapshot")
		file, err := snapfile.Open(f.Name())
		if err != nil {
			return err
		}
		facts.Revision, facts.Keys = file.Revision, int64(file.Counts.Keys)
		return file.Close()
	})
	var place *fs.PathError
	if errors.As(err, &place) {
		err = fmt.Errorf("save the snapshot: %s: %w", place.Path, place.Err)
	}
	return facts, err
}

func (c *client) receive(ctx context.Context, f *os.File, say func(string)) (size int64, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.maint.Snapshot(ctx, &pb.SnapshotRequest{})
	for err == nil {
		var part *pb.SnapshotResponse
		if part, err = stream.Recv(); err != nil {
			break
		}
		var n int
		if n, err = f.Write(part.GetBlob()); err != nil {
			return size, err
		}
		size += int64(n)
		say(fmt.Sprintf("saving the snapshot, %s so far", show.Bytes(uint64(size))))
	}
	if !errors.Is(err, io.EOF) {
		return size, clientv3.ContextError(ctx, err)
	}
	return size, nil
}

const (
	// importOps is the maximum number of keys that an import puts in one transaction: etcd's default limit.
	importOps = 128
	// importBytes is the maximum size in bytes of the keys and values that an import puts in one transaction. The
	// maximum size of a request is 1.5 MiB, so there is room for the rest of the request.
	importBytes = 1 << 20
)

// importFacts is the result of an import of a snapshot: the numbers of keys and bytes that were put, the revision of
// the last transaction, and the number of keys that had a lease in the snapshot.
type importFacts struct {
	Keys     int64 `json:"keys"`
	Bytes    int64 `json:"bytes"`
	Revision int64 `json:"revision"`
	Leased   int64 `json:"leased,omitempty"`
}

func importCommand(n *kvSession) *cobra.Command {
	var prefix string
	c := &cobra.Command{
		Use: "import FILE", Short: "Load the keys of an etcd snapshot file",
		Long: `Load the keys of a snapshot file of etcdctl or trivet kv snapshot save, in the order of their creation.

The whole file is verified before the first write. Existing keys with the same names are overwritten, other keys are
not changed. Up to 128 keys are written per transaction; an interrupted import can be repeated. Keys get new
revisions. Earlier versions of keys and leases are not loaded: keys that had a lease have none afterwards.`,
		Args: session.Exactly("FILE"),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveDefault
		},
	}
	c.Flags().StringVar(&prefix, "prefix", "", "load only keys with this prefix")
	c.RunE = n.run(0, func(ctx context.Context, c *client, args []string) error {
		var done importFacts
		err := n.Wait("checking "+args[0], func(say func(string)) (err error) {
			done, err = c.load(ctx, args[0], prefix, say)
			return err
		})
		if err != nil {
			if done.Keys > 0 {
				n.Note("%d keys were loaded before the error: repeat the import to load all", done.Keys)
			}
			return err
		}
		if done.Leased > 0 {
			n.Note("%d of the keys had a lease, and have none now", done.Leased)
		}
		return n.print(done, nil, func(w io.Writer) error {
			return show.Fields(w, [][2]string{
				{"Keys", number(done.Keys)}, {"Size", show.Bytes(uint64(done.Bytes))}, {"Revision", number(done.Revision)},
			})
		})
	})
	return c
}

func (c *client) load(ctx context.Context, path, prefix string, say func(string)) (done importFacts, err error) {
	file, err := snapfile.Open(path)
	if err != nil {
		return done, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	var batch []*mvccpb.KeyValue
	size := 0
	flush := func() error {
		if len(batch) == 0 {
			return nil
		}
		ops := make([]clientv3.Op, len(batch))
		for i, kv := range batch {
			ops[i] = clientv3.OpPut(string(kv.GetKey()), string(kv.GetValue()))
		}
		r, err := c.keys.Txn(ctx).Then(ops...).Commit()
		if err != nil {
			return fmt.Errorf("load %s: %w", show.Text(strconv.Quote(string(batch[0].GetKey()))), err)
		}
		done.Keys, done.Bytes, done.Revision = done.Keys+int64(len(batch)), done.Bytes+int64(size), r.Header.GetRevision()
		batch, size = batch[:0], 0
		say(fmt.Sprintf("loaded %d of %d keys", done.Keys, file.Counts.Keys))
		return nil
	}
	for kv, err := range file.Keys() {
		if err != nil {
			return done, err
		}
		if len(kv.GetKey()) < len(prefix) || string(kv.GetKey()[:len(prefix)]) != prefix {
			continue
		}
		one := len(kv.GetKey()) + len(kv.GetValue())
		if len(batch) == importOps || size+one > importBytes {
			if err := flush(); err != nil {
				return done, err
			}
		}
		if kv.GetLease() != 0 {
			done.Leased++
		}
		batch, size = append(batch, kv), size+one
	}
	return done, flush()
}
