package kv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
)

// maxValue is the maximum size in bytes of a value that is read from standard input: the maximum size of a request.
const maxValue = 3 << 19

// keyRange holds the flags that make the argument KEY select several keys: --prefix selects all keys that begin with
// KEY, --from-key selects KEY and all keys after it.
type keyRange struct{ prefix, fromKey bool }

func (p *keyRange) add(f *pflag.FlagSet, what string) {
	f.BoolVar(&p.prefix, "prefix", false, what+" the keys that begin with KEY")
	f.BoolVar(&p.fromKey, "from-key", false, what+" KEY and all keys after it, by bytes")
}

// The method of returns the first key of the range that the arguments and flags select, and the options for the end of
// the range.
func (p *keyRange) of(args []string) (key string, opts []clientv3.OpOption, err error) {
	if p.prefix && p.fromKey {
		return "", nil, session.Usagef("give --prefix or --from-key, not both")
	}
	key = args[0]
	if len(args) == 2 {
		if p.prefix || p.fromKey {
			return "", nil, session.Usagef("give END, or --prefix or --from-key, not both")
		}
		return key, []clientv3.OpOption{clientv3.WithRange(args[1])}, nil
	}
	switch {
	case key == "" && (p.prefix || p.fromKey):
		return "\x00", []clientv3.OpOption{clientv3.WithFromKey()}, nil
	case p.prefix:
		opts = append(opts, clientv3.WithPrefix())
	case p.fromKey:
		opts = append(opts, clientv3.WithFromKey())
	}
	return key, opts, nil
}

// The method one reports whether the arguments and flags select a single key.
func (p *keyRange) one(args []string) bool { return len(args) == 1 && !p.prefix && !p.fromKey }

// keyAndEnd checks that the arguments of a command are KEY and optionally END.
func keyAndEnd(_ *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return errors.New("KEY is missing")
	case len(args) > 2:
		return fmt.Errorf("unexpected argument %q", args[2])
	}
	return nil
}

// getFlags holds the flags of get, both of the command `trivet kv get` and of the operation in a transaction.
type getFlags struct {
	span                                 keyRange
	limit, rev                           int64
	minCreate, maxCreate, minMod, maxMod int64
	keysOnly, countOnly, valueOnly       bool
	sortBy, order, consistency           string
}

func (g *getFlags) add(f *pflag.FlagSet) {
	g.span.add(f, "get")
	f.Int64Var(&g.limit, "limit", 0, "get at most this many keys; 0 is all")
	f.Int64Var(&g.rev, "rev", 0, "get the keys at this revision; 0 is the current one")
	f.BoolVar(&g.keysOnly, "keys-only", false, "get keys without values")
	f.BoolVar(&g.countOnly, "count-only", false, "get only the number of keys")
	f.StringVar(&g.sortBy, "sort-by", "", "sort by create, key, modify, value or version")
	f.StringVar(&g.order, "order", "", "sort order: ascend or descend")
	f.StringVar(&g.consistency, "consistency", "l", "l: linearizable; s: serializable, the member's own data, perhaps outdated")
	f.Int64Var(&g.minCreate, "min-create-rev", 0, "get only keys created at this revision or later")
	f.Int64Var(&g.maxCreate, "max-create-rev", 0, "get only keys created at this revision or before")
	f.Int64Var(&g.minMod, "min-mod-rev", 0, "get only keys changed at this revision or later")
	f.Int64Var(&g.maxMod, "max-mod-rev", 0, "get only keys changed at this revision or before")
}

var (
	targets = map[string]clientv3.SortTarget{
		"": clientv3.SortByKey, "key": clientv3.SortByKey, "create": clientv3.SortByCreateRevision, "modify": clientv3.SortByModRevision,
		"value": clientv3.SortByValue, "version": clientv3.SortByVersion,
	}
	orders = map[string]clientv3.SortOrder{"": clientv3.SortNone, "ascend": clientv3.SortAscend, "descend": clientv3.SortDescend}
)

func (g *getFlags) op(args []string) (clientv3.Op, error) {
	var none clientv3.Op
	key, opts, err := g.span.of(args)
	if err != nil {
		return none, err
	}
	target, ok := targets[strings.ToLower(g.sortBy)]
	if !ok {
		return none, session.Usagef("--sort-by %q: want create, key, modify, value or version", g.sortBy)
	}
	order, ok := orders[strings.ToLower(g.order)]
	if !ok {
		return none, session.Usagef("--order %q: want ascend or descend", g.order)
	}
	if g.keysOnly && g.countOnly {
		return none, session.Usagef("give --keys-only or --count-only, not both")
	}
	for _, v := range []struct {
		flag string
		n    int64
		opt  func(int64) clientv3.OpOption
	}{
		{"limit", g.limit, clientv3.WithLimit}, {"rev", g.rev, clientv3.WithRev},
		{"min-create-rev", g.minCreate, clientv3.WithMinCreateRev}, {"max-create-rev", g.maxCreate, clientv3.WithMaxCreateRev},
		{"min-mod-rev", g.minMod, clientv3.WithMinModRev}, {"max-mod-rev", g.maxMod, clientv3.WithMaxModRev},
	} {
		if v.n < 0 {
			return none, session.Usagef("--%s: want 0 or more, got %d", v.flag, v.n)
		}
		if v.n > 0 {
			opts = append(opts, v.opt(v.n))
		}
	}
	opts = append(opts, clientv3.WithSort(target, order))
	if g.keysOnly {
		opts = append(opts, clientv3.WithKeysOnly())
	}
	if g.countOnly {
		opts = append(opts, clientv3.WithCountOnly())
	}
	switch g.consistency {
	case "l":
	case "s":
		opts = append(opts, clientv3.WithSerializable())
	default:
		return none, session.Usagef("--consistency %q: want l or s", g.consistency)
	}
	return clientv3.OpGet(key, opts...), nil
}

func getCommand(n *kvSession) *cobra.Command {
	var f getFlags
	c := &cobra.Command{
		Use: "get KEY [END]", Short: "Show a key, or the keys in [KEY, END)",
		Example: "  trivet kv get /app/config --print-value-only > config\n  trivet kv get /app/ --prefix --keys-only",
		Args:    keyAndEnd,
	}
	f.add(c.Flags())
	c.Flags().BoolVar(&f.valueOnly, "print-value-only", false, "print only the values, unchanged, each followed by a newline")
	c.RunE = n.run(callTimeout, func(ctx context.Context, c *client, args []string) error {
		op, err := f.op(args)
		if err != nil {
			return err
		}
		if f.valueOnly && (f.countOnly || f.keysOnly || n.Form != show.Table) {
			return session.Usagef("--print-value-only cannot be combined with --keys-only, --count-only or --output")
		}
		r, err := f.read(ctx, n, c, op)
		if err == nil && f.span.one(args) && r.GetCount() == 0 && !f.countOnly {
			return session.NotFound("`trivet kv get \"\" --prefix --keys-only` shows the existing ones", "no key %q", args[0])
		}
		return err
	})
	return c
}

// read makes the call op, prints the keys and values of the response, and says if --limit has left keys out.
func (g *getFlags) read(ctx context.Context, n *kvSession, c *client, op clientv3.Op) (*pb.RangeResponse, error) {
	got, err := c.keys.Do(ctx, op)
	if err != nil {
		return nil, err
	}
	r := (*pb.RangeResponse)(got.Get())
	if err := n.print(r, keysOf(r.GetKvs()), func(w io.Writer) error { return g.table(w, r) }); err != nil {
		return nil, err
	}
	if r.GetMore() {
		n.Note("there are more, %d in all: --limit is %d", r.GetCount(), g.limit)
	}
	return r, nil
}

// listCommand returns the command `trivet kv list`, which etcdctl does not have. It has the flags of get that concern
// the keys without their values.
func listCommand(n *kvSession) *cobra.Command {
	f := getFlags{span: keyRange{prefix: true}, keysOnly: true, consistency: "l"}
	c := &cobra.Command{
		Use: "list [PREFIX]", Short: "List the keys, or those that begin with PREFIX", Args: session.AtMost("PREFIX"),
		Long: `List the keys, or those that begin with PREFIX, without their values. It is the same as
"trivet kv get PREFIX --prefix --keys-only".`,
		Example: "  trivet kv list\n  trivet kv list /app/ --limit 10",
	}
	c.Flags().Int64Var(&f.limit, "limit", 0, "list at most this many keys; 0 is all")
	c.Flags().Int64Var(&f.rev, "rev", 0, "list the keys at this revision; 0 is the current one")
	c.RunE = n.run(callTimeout, func(ctx context.Context, c *client, args []string) error {
		op, err := f.op([]string{strings.Join(args, "")})
		if err != nil {
			return err
		}
		_, err = f.read(ctx, n, c, op)
		return err
	})
	return c
}

func (g *getFlags) table(w io.Writer, r *pb.RangeResponse) error {
	switch {
	case g.valueOnly:
		for _, kv := range r.GetKvs() {
			if _, err := w.Write(append(bytes.Clone(kv.GetValue()), '\n')); err != nil {
				return err
			}
		}
		return nil
	case g.countOnly:
		_, err := fmt.Fprintln(w, r.GetCount())
		return err
	case g.keysOnly:
		for _, kv := range r.GetKvs() {
			if _, err := fmt.Fprintln(w, show.Text(string(kv.GetKey()))); err != nil {
				return err
			}
		}
		return nil
	case len(r.GetKvs()) == 0:
		return nil
	}
	return table(w, r.GetKvs())
}

var header = []string{"KEY", "VERSION", "CREATED", "MODIFIED", "LEASE", "VALUE"}

// table prints keys as a table with their metadata and values.
func table(w io.Writer, kvs []*mvccpb.KeyValue) error {
	rows := make([][]string, len(kvs))
	for i, kv := range kvs {
		rows[i] = []string{string(kv.GetKey()), number(kv.GetVersion()), number(kv.GetCreateRevision()), number(kv.GetModRevision()),
			leaseName(kv.GetLease()), string(kv.GetValue())}
	}
	return show.Rows(w, header, rows)
}

func number(n int64) string { return strconv.FormatInt(n, 10) }

func keysOf(kvs []*mvccpb.KeyValue) (names []string) {
	for _, kv := range kvs {
		names = append(names, string(kv.GetKey()))
	}
	return names
}

// putFlags holds the flags of put, both of the command `trivet kv put` and of the operation in a transaction.
type putFlags struct {
	lease                            string
	prevKV, ignoreValue, ignoreLease bool
}

func (p *putFlags) add(f *pflag.FlagSet) {
	f.StringVar(&p.lease, "lease", "", "ID of the lease in hexadecimal; the key is deleted when the lease expires")
	f.BoolVar(&p.prevKV, "prev-kv", false, "show the previous key and value")
	f.BoolVar(&p.ignoreValue, "ignore-value", false, "keep the current value of the key")
	f.BoolVar(&p.ignoreLease, "ignore-lease", false, "keep the current lease of the key")
}

func (p *putFlags) op(key, value string) (clientv3.Op, error) {
	var opts []clientv3.OpOption
	if p.lease != "" {
		id, err := leaseID(p.lease)
		if err != nil {
			return clientv3.Op{}, err
		}
		opts = append(opts, clientv3.WithLease(id))
	}
	if p.lease != "" && p.ignoreLease {
		return clientv3.Op{}, session.Usagef("give --lease or --ignore-lease, not both")
	}
	for _, o := range []struct {
		set bool
		opt clientv3.OpOption
	}{{p.prevKV, clientv3.WithPrevKV()}, {p.ignoreValue, clientv3.WithIgnoreValue()}, {p.ignoreLease, clientv3.WithIgnoreLease()}} {
		if o.set {
			opts = append(opts, o.opt)
		}
	}
	return clientv3.OpPut(key, value, opts...), nil
}

// args checks that the arguments of a put are KEY and VALUE, or only KEY with --ignore-value.
func (p *putFlags) args(args []string) error {
	switch {
	case len(args) == 0:
		return errors.New("KEY is missing")
	case len(args) == 1 && !p.ignoreValue:
		return errors.New("VALUE is missing: give - to read it from standard input")
	case len(args) > 1 && p.ignoreValue:
		return errors.New("VALUE cannot be given with --ignore-value")
	case len(args) > 2:
		return fmt.Errorf("unexpected argument %q", args[2])
	}
	return nil
}

func putCommand(n *kvSession) *cobra.Command {
	var f putFlags
	c := &cobra.Command{
		Use: "put KEY VALUE", Short: "Set a key", SuggestFor: []string{"set", "create", "update"},
		Long:    "Set a key. The VALUE - reads all of standard input. Write -- before a KEY or VALUE that begins with a dash.",
		Example: "  trivet kv put greeting hello\n  trivet kv put /app/config - < config",
		Args:    func(_ *cobra.Command, args []string) error { return f.args(args) },
	}
	f.add(c.Flags())
	c.RunE = n.run(callTimeout, func(ctx context.Context, c *client, args []string) error {
		value := ""
		if len(args) == 2 {
			var err error
			if value, err = n.value(args[1]); err != nil {
				return err
			}
		}
		op, err := f.op(args[0], value)
		if err != nil {
			return err
		}
		got, err := c.keys.Do(ctx, op)
		if err != nil {
			return err
		}
		r := (*pb.PutResponse)(got.Put())
		return n.print(r, []string{args[0]}, func(w io.Writer) error { return putDone(w, r) })
	})
	return c
}

func putDone(w io.Writer, r *pb.PutResponse) error {
	if _, err := fmt.Fprintf(w, "set at revision %d\n", r.GetHeader().GetRevision()); err != nil || r.GetPrevKv() == nil {
		return err
	}
	return table(w, []*mvccpb.KeyValue{r.GetPrevKv()})
}

// value returns arg or, if arg is "-", the content of standard input, which must not be longer than maxValue.
func (n *kvSession) value(arg string) (string, error) {
	if arg != "-" {
		return arg, nil
	}
	text, err := io.ReadAll(io.LimitReader(n.Stdin, maxValue+1))
	if err != nil {
		return "", fmt.Errorf("read standard input: %w", err)
	}
	if len(text) > maxValue {
		return "", fmt.Errorf("standard input is longer than %d bytes, the maximum of a value", maxValue)
	}
	return string(text), nil
}

// delFlags holds the flags of del, both of the command `trivet kv del` and of the operation in a transaction.
type delFlags struct {
	span   keyRange
	prevKV bool
}

func (d *delFlags) add(f *pflag.FlagSet) {
	d.span.add(f, "delete")
	f.BoolVar(&d.prevKV, "prev-kv", false, "show the previous key and value")
}

func (d *delFlags) op(args []string) (clientv3.Op, error) {
	key, opts, err := d.span.of(args)
	if d.prevKV {
		opts = append(opts, clientv3.WithPrevKV())
	}
	return clientv3.OpDelete(key, opts...), err
}

func delCommand(n *kvSession) *cobra.Command {
	var f delFlags
	c := &cobra.Command{Use: "del KEY [END]", Aliases: []string{"delete", "rm"}, Short: "Delete a key, or the keys in [KEY, END)", Args: keyAndEnd}
	f.add(c.Flags())
	c.RunE = n.run(callTimeout, func(ctx context.Context, c *client, args []string) error {
		op, err := f.op(args)
		if err != nil {
			return err
		}
		got, err := c.keys.Do(ctx, op)
		if err != nil {
			return err
		}
		r := (*pb.DeleteRangeResponse)(got.Del())
		return n.print(r, keysOf(r.GetPrevKvs()), func(w io.Writer) error { return delDone(w, r) })
	})
	return c
}

func delDone(w io.Writer, r *pb.DeleteRangeResponse) error {
	if _, err := fmt.Fprintf(w, "deleted %d\n", r.GetDeleted()); err != nil || len(r.GetPrevKvs()) == 0 {
		return err
	}
	return table(w, r.GetPrevKvs())
}
