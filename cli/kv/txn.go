package kv

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/trivet-cloud/trivet/cli/session"
)

// maxTxn is the maximum size in bytes of the text of a transaction. A transaction with a longer text cannot fit in a
// request.
const maxTxn = 8 << 20

func txnCommand(n *kvSession) *cobra.Command {
	c := &cobra.Command{
		Use: "txn", Short: "Run a transaction from standard input",
		Long: `Run a transaction from standard input, in the syntax of etcdctl: conditions, an empty line, the operations if all
conditions are true, an empty line, the operations otherwise.

A condition compares version, create, mod, value or lease of a key: mod("key") > "0". Operations are get, put and
del with their flags. Words are separated by spaces; "…" can contain spaces and escape sequences, '…' every
character but '.`,
		Example: `  trivet kv txn <<END
  version("job") = "0"

  put job mine

  get job
  END`,
		Args: session.Exactly(),
	}
	c.Flags().BoolP("interactive", "i", false, "accepted for compatibility with etcdctl: no prompts are printed")
	_ = c.Flags().MarkHidden("interactive")
	c.RunE = n.run(callTimeout, func(ctx context.Context, c *client, _ []string) error {
		t, err := parseTxn(n.Stdin)
		if err != nil {
			return err
		}
		r, err := c.keys.Txn(ctx).If(t.conditions...).Then(t.success...).Else(t.failure...).Commit()
		if err != nil {
			return err
		}
		answer := (*pb.TxnResponse)(r)
		return n.print(txnJSON(answer), txnNames(answer), func(w io.Writer) error { return txnTable(w, answer) })
	})
	return c
}

// transaction is a parsed transaction. The operations in success are executed if all conditions are true, otherwise
// those in failure.
type transaction struct {
	conditions       []clientv3.Cmp
	success, failure []clientv3.Op
}

// parseTxn parses a transaction in the syntax of etcdctl. It has three parts, separated by empty lines: conditions,
// operations if all conditions are true, and operations otherwise. Errors contain the line number.
func parseTxn(in io.Reader) (*transaction, error) {
	var t transaction
	lines := bufio.NewScanner(io.LimitReader(in, maxTxn+1))
	lines.Buffer(nil, maxTxn)
	part, read, number := 0, 0, 0
	for lines.Scan() {
		number++
		read += len(lines.Bytes()) + 1
		line := strings.TrimSpace(lines.Text())
		if line == "" {
			if part++; part > 2 {
				break
			}
			continue
		}
		var err error
		switch part {
		case 0:
			var c clientv3.Cmp
			c, err = parseCompare(line)
			t.conditions = append(t.conditions, c)
		case 1, 2:
			var op clientv3.Op
			op, err = parseOp(line)
			if part == 1 {
				t.success = append(t.success, op)
			} else {
				t.failure = append(t.failure, op)
			}
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong) || err == nil && read > maxTxn:
		return nil, fmt.Errorf("standard input is longer than %d bytes, the maximum of a transaction", maxTxn)
	case err != nil:
		return nil, fmt.Errorf("read standard input: %w", err)
	case len(t.conditions)+len(t.success)+len(t.failure) == 0:
		return nil, errors.New("standard input contains no transaction: see `trivet kv txn --help`")
	}
	return &t, nil
}

// comparison matches a condition of the form target("key") relation "value". A value without blanks needs no quotes.
var comparison = regexp.MustCompile(`^(\w+)\(("(?:[^"\\]|\\.)*"|[^"()\s]+)\)\s*(!=|[=<>])\s*("(?:[^"\\]|\\.)*"|[^"\s]+)$`)

func parseCompare(line string) (clientv3.Cmp, error) {
	var none clientv3.Cmp
	m := comparison.FindStringSubmatch(line)
	if m == nil {
		return none, fmt.Errorf(`%q is not a condition: want, for example, mod("key") > "0"`, line)
	}
	key, err := unquoted(m[2])
	if err != nil {
		return none, err
	}
	value, err := unquoted(m[4])
	if err != nil {
		return none, err
	}
	var cmp clientv3.Cmp
	base := 10
	switch m[1] {
	case "val", "value":
		return clientv3.Compare(clientv3.Value(key), m[3], value), nil
	case "ver", "version":
		cmp = clientv3.Version(key)
	case "c", "create":
		cmp = clientv3.CreateRevision(key)
	case "m", "mod":
		cmp = clientv3.ModRevision(key)
	case "lease":
		cmp, base = clientv3.LeaseValue(key), 16
	default:
		return none, fmt.Errorf("%q compares %s: want version, create, mod, value or lease", line, m[1])
	}
	n, err := strconv.ParseInt(value, base, 64)
	if err != nil {
		return none, fmt.Errorf("%q compares with %q, which is not a whole number in base %d", line, value, base)
	}
	return clientv3.Compare(cmp, m[3], n), nil
}

func unquoted(s string) (string, error) {
	if !strings.HasPrefix(s, `"`) {
		return s, nil
	}
	text, err := strconv.Unquote(s)
	if err != nil {
		return "", fmt.Errorf("%s is not a valid quoted string", s)
	}
	return text, nil
}

func parseOp(line string) (clientv3.Op, error) {
	var none clientv3.Op
	args, err := splitWords(line)
	if err != nil {
		return none, err
	}
	f := pflag.NewFlagSet(args[0], pflag.ContinueOnError)
	f.SetOutput(io.Discard)
	var op func() (clientv3.Op, error)
	switch args[0] {
	case "get":
		var g getFlags
		g.add(f)
		op = func() (clientv3.Op, error) {
			if err := keyAndEnd(nil, f.Args()); err != nil {
				return none, err
			}
			return g.op(f.Args())
		}
	case "put":
		var p putFlags
		p.add(f)
		op = func() (clientv3.Op, error) {
			if err := p.args(f.Args()); err != nil {
				return none, err
			}
			return p.op(f.Arg(0), f.Arg(1))
		}
	case "del", "delete":
		var d delFlags
		d.add(f)
		op = func() (clientv3.Op, error) {
			if err := keyAndEnd(nil, f.Args()); err != nil {
				return none, err
			}
			return d.op(f.Args())
		}
	default:
		return none, fmt.Errorf("%q: want get, put or del", args[0])
	}
	if err := f.Parse(args[1:]); err != nil {
		return none, fmt.Errorf("%s: %w", args[0], err)
	}
	o, err := op()
	if err != nil {
		return none, fmt.Errorf("%s: %w", args[0], err)
	}
	return o, nil
}

// word matches the first word of a line: a word in quotes, or the text up to the next blank.
var word = regexp.MustCompile(`^(?:"(?:[^"\\]|\\.)*"|'[^']*'|[^"'\s]\S*)`)

// splitWords splits an operation into words, with quotes removed. It returns an error if a quote is not closed.
func splitWords(line string) (words []string, err error) {
	for rest := strings.TrimSpace(line); rest != ""; rest = strings.TrimSpace(rest) {
		w := word.FindString(rest)
		if w == "" {
			return nil, fmt.Errorf("a quote is not closed: %s", rest)
		}
		rest = rest[len(w):]
		if w[0] == '\'' {
			w = w[1 : len(w)-1]
		} else if w, err = unquoted(w); err != nil {
			return nil, err
		}
		words = append(words, w)
	}
	return words, nil
}

func txnTable(w io.Writer, r *pb.TxnResponse) error {
	outcome := "the conditions did not hold"
	if r.GetSucceeded() {
		outcome = "the conditions held"
	}
	if _, err := fmt.Fprintf(w, "%s, revision %d\n", outcome, r.GetHeader().GetRevision()); err != nil {
		return err
	}
	for _, one := range r.GetResponses() {
		var err error
		switch one := one.GetResponse().(type) {
		case *pb.ResponseOp_ResponseRange:
			if got := one.ResponseRange; len(got.GetKvs()) > 0 {
				err = table(w, got.GetKvs())
			} else {
				_, err = fmt.Fprintf(w, "found %d\n", got.GetCount())
			}
		case *pb.ResponseOp_ResponsePut:
			// Print no revision: the response of an operation inside of a transaction contains none.
			if _, err = fmt.Fprintln(w, "set"); err == nil && one.ResponsePut.GetPrevKv() != nil {
				err = table(w, []*mvccpb.KeyValue{one.ResponsePut.GetPrevKv()})
			}
		case *pb.ResponseOp_ResponseDeleteRange:
			err = delDone(w, one.ResponseDeleteRange)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func txnNames(r *pb.TxnResponse) (names []string) {
	for _, one := range r.GetResponses() {
		names = append(names, keysOf(one.GetResponseRange().GetKvs())...)
	}
	return names
}

// txnAnswer is the response to a transaction as JSON, as etcdctl prints it. It exists because encoding/json does not
// encode the oneof fields of TxnResponse that way.
type txnAnswer struct {
	Header    *pb.ResponseHeader `json:"header,omitempty"`
	Succeeded bool               `json:"succeeded,omitempty"`
	Responses []opAnswer         `json:"responses,omitempty"`
}

type opAnswer struct {
	Response struct {
		Range  *pb.RangeResponse       `json:"response_range,omitempty"`
		Put    *pb.PutResponse         `json:"response_put,omitempty"`
		Delete *pb.DeleteRangeResponse `json:"response_delete_range,omitempty"`
	} `json:"Response"`
}

func txnJSON(r *pb.TxnResponse) txnAnswer {
	out := txnAnswer{Header: r.GetHeader(), Succeeded: r.GetSucceeded()}
	for _, one := range r.GetResponses() {
		var a opAnswer
		a.Response.Range, a.Response.Put, a.Response.Delete = one.GetResponseRange(), one.GetResponsePut(), one.GetResponseDeleteRange()
		out.Responses = append(out.Responses, a)
	}
	return out
}
