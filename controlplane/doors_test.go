package main

import (
	"flag"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	etcdpb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var rewrite = flag.Bool("rewrite", false, "write testdata instead of comparing with it")

// table is what the calls came to.
type table struct {
	text         strings.Builder
	cells, wrong int
	complaints   []string
}

func (b *table) complain(format string, args ...any) {
	b.complaints = append(b.complaints, fmt.Sprintf(format, args...))
}

// Every endpoint of every listener of a member that runs × every kind of token: the exact answer. An endpoint that is
// added without a class or a row fails, and so does a row or a rule without an endpoint.
func TestDoors(t *testing.T) {
	h := newHouse(t)
	h.furnish()
	b := &table{}
	b.text.WriteString(legend())
	all, rows := survey(b, h.doors)
	require.Empty(t, b.complaints, "endpoints without a class or a row, or these without an endpoint")

	// For what callers on loopback may do before etcd's Auth is enabled see TestGoverningTakesACredential.
	tokens := &purse{h, map[string]string{}}
	for _, etcdToo := range []bool{false, true} {
		if etcdToo {
			h.enableEtcdAuth()
		}
		for _, d := range h.doors {
			if byCertificate[d.name] == "" && (d.grpc != nil || !etcdToo) {
				h.knock(b, d, all[d.name], rows, tokens, etcdToo)
			}
		}
	}
	h.showCertificates(b, all, rows, tokens)

	for _, c := range b.complaints {
		t.Error(c)
	}
	h.searchAudit(tokens)
	endpoints, cells := 0, 0
	for name, of := range all {
		endpoints += len(of)
		if byCertificate[name] != "" {
			cells += len(of) * len(certificates)
		} else {
			cells += len(of) * len(columns)
		}
	}
	require.Equal(t, cells, b.cells, "no cell is missing")
	t.Logf("%d endpoints, %d cells, %d wrong", endpoints, b.cells, b.wrong)
	fmt.Fprintf(&b.text, "%d endpoints, %d cells\n", endpoints, b.cells)
	if !t.Failed() {
		h.compare(b.text.String())
	}
}

func (h *house) compare(text string) {
	const file = "testdata/doors.txt"
	if *rewrite {
		require.NoError(h.t, os.MkdirAll("testdata", 0o755))
		require.NoError(h.t, os.WriteFile(file, []byte(text), 0o644))
		return
	}
	want, err := os.ReadFile(file)
	require.NoError(h.t, err)
	require.Equal(h.t, string(want), text, "the authorization table has changed: check the difference, then run with -rewrite")
}

// survey finds every endpoint, by its listener, and its row, and complains of whatever is missing or too much.
func survey(b *table, doors []door) (all map[string][]endpoint, rows map[string]row) {
	rows, used, served := map[string]row{}, map[string]bool{}, map[auth.Method]bool{}
	for _, part := range [][]row{machineRows, identityRows, creditRows, restRows, etcdRows, certifiedRows} {
		for _, r := range part {
			if _, twice := rows[r.name]; twice {
				b.complain("%s has two rows", r.name)
			}
			r.order = len(rows)
			rows[r.name] = r
		}
	}
	all = map[string][]endpoint{}
	for _, d := range doors {
		found, err := d.endpoints()
		if err != nil {
			b.complain("%v", err)
		}
		all[d.name] = found
		for _, e := range found {
			if e.class == "" {
				b.complain("%s: neither has a rule nor says why it is open", e.name)
			}
			if r, ok := rows[e.row]; !ok {
				b.complain("%s has no row", e.row)
			} else if slices.Contains(refusals(e, r), r.right) {
				b.complain("%s: the answer to whoever may, %s, does not differ from a refusal", e.name, r.right)
			}
			used[e.row] = true
			if e.class == ruled {
				served[e.as] = true
			}
		}
	}
	for name := range rows {
		if !used[name] {
			b.complain("%s has a row but is not served", name)
		}
	}
	for method := range auth.Rules() {
		if !served[method] {
			b.complain("%s has a rule but is not served", method)
		}
	}
	for method := range auth.Open {
		if _, too := auth.Rules()[method]; too || !used[string(method)] {
			b.complain("%s is said to be open, but has a rule or is not served", method)
		}
	}
	return all, rows
}

// refusals are the answers to whoever may not call an endpoint.
func refusals(e endpoint, r row) []string {
	switch {
	case e.class == ruled && e.method != "":
		return []string{unauthenticated[true], denied[true]}
	case e.class == ruled:
		return []string{unauthenticated[false], denied[false]}
	case e.class == etcd && r.asks == "":
		return []string{unauthenticated[false], "INVALID_ARGUMENT"}
	case e.class == peers:
		return []string{"UNAVAILABLE"}
	case e.method != "":
		return nil
	}
	return []string{unauthenticated[false]}
}

// knock calls the endpoints of a listener with each kind of token, either those of etcd or the others.
func (h *house) knock(b *table, d door, endpoints []endpoint, rows map[string]row, tokens *purse, etcdToo bool) {
	var conn *grpc.ClientConn
	if d.grpc != nil {
		conn = h.dial(d.address, insecure.NewCredentials())
	}
	order := slices.DeleteFunc(slices.Clone(endpoints), func(e endpoint) bool { return (e.class == etcd) != etcdToo })
	// Some rows undo what others did.
	slices.SortFunc(order, func(a, b endpoint) int { return rows[a.row].order - rows[b.row].order })
	if len(order) == 0 {
		return
	}
	fmt.Fprintf(&b.text, "\n# %s\n", d.name)
	for _, e := range order {
		r := rows[e.row]
		var cells []string
		for _, c := range columns {
			got := h.cell(b, visit{endpoint: e, conn: conn, token: tokens.of(c, r), drain: r.drain}, r, c)
			cells = append(cells, short(got, r, e.method != ""))
		}
		b.line(e, r, cells)
	}
}

// cell calls an endpoint with one kind of token and says what came of it.
func (h *house) cell(b *table, v visit, r row, c column) (got string) {
	// Of an org's things another project of it has as much as this one.
	theirs := c.who.role == cloud.SystemAdmin || c.nature == role || c.who.at.Org == web.Org && auth.Rules()[v.as].Scope == auth.OfOrg
	how := everything
	if theirs {
		how = asWritten
	}
	h.ask(&v, r, c, how)
	got, message := h.outcome(v)
	b.cells++
	if want := expected(v.endpoint, r, c); got != want {
		b.wrong++
		b.complain("%s with %s: got %s, want %s", v.name, c.name, got, want)
	}
	if c.nature == byID && !theirs {
		h.ask(&v, r, c, nothing)
		if _, otherwise := h.outcome(v); h.anonymous(message) != h.anonymous(otherwise) {
			b.complain("%s with %s tells what is there: %q, but otherwise %q", v.name, c.name, message, otherwise)
		}
	}
	if v.method == http.MethodGet {
		v.method = http.MethodHead
		if head, _ := h.outcome(v); head != got[:3] {
			b.complain("%s with %s: %s, but HEAD %s", v.name, c.name, got, head)
		}
	}
	if r.then != nil {
		r.then(h)
	}
	return got
}

// ask fills the request of a row as a column has it.
func (h *house) ask(v *visit, r row, c column, how filling) {
	v.path, v.body = h.fill(r.path, how), h.fill(r.ask, how)
	if c.nature == byID || c.nature == mute {
		v.body = nameless(h, v.body)
	}
}

// anonymous is a message without the ids of what was asked for.
func (h *house) anonymous(message string) string {
	for _, name := range hidden {
		message = strings.ReplaceAll(message, h.things[name], gone)
	}
	return message
}

// line writes a row of the table, and why some of its cells are other than its rule would have them.
func (b *table) line(e endpoint, r row, cells []string) {
	name := strings.TrimPrefix(e.name, e.door.name+" ")
	fmt.Fprintf(&b.text, "%-62s", name)
	for _, c := range cells {
		fmt.Fprintf(&b.text, " %-4s", c)
	}
	fmt.Fprintf(&b.text, "  %s\n", r.right)
	for _, x := range r.but {
		fmt.Fprintf(&b.text, "    %s: %s, since %s\n", strings.Join(x.columns, ", "), x.answer, x.why)
	}
}

// short is an outcome as a cell shows it.
func short(outcome string, r row, isREST bool) string {
	switch outcome {
	case r.right:
		return "="
	case unauthenticated[isREST]:
		return "-"
	case denied[isREST]:
		return "x"
	case noTenant:
		return "t"
	case "NOT_FOUND", "404 NOT_FOUND":
		return "?"
	case "INVALID_ARGUMENT", "400 INVALID_ARGUMENT":
		return "!"
	}
	return outcome
}

func legend() string {
	var b strings.Builder
	b.WriteString(`Every endpoint of a member × every kind of token. Written by go test ./controlplane -run TestDoors -rewrite.

=  what whoever may is answered, which stands at the end of the line
-  UNAUTHENTICATED, on REST 401 UNAUTHENTICATED
x  PERMISSION_DENIED, on REST 403 FORBIDDEN
?  NOT_FOUND, on REST 404 NOT_FOUND
t  NOT_FOUND of the tenant: it does not exist, or the caller has no role in it; on REST x
!  INVALID_ARGUMENT, on REST 400 INVALID_ARGUMENT

`)
	for _, c := range columns {
		fmt.Fprintf(&b, "%-5s %s\n", c.short, c.name)
	}
	b.WriteString(`
Of another project and another org the request names the tenant that the thing belongs to; "by id" it does not. The others
are roles in that project, and last the administrator's token for the cloud. etcd's API is called with its Auth enabled:
before that, callers on loopback may use keys and read without a token; changes of the cluster and of Auth take one.

`)
	fmt.Fprintf(&b, "%-62s", "")
	for _, c := range columns {
		fmt.Fprintf(&b, " %-4s", c.short)
	}
	b.WriteString("\n")
	return b.String()
}

// enableAgain undoes an AuthDisable.
func enableAgain(h *house) {
	do(h, etcdpb.NewAuthClient(h.public).AuthEnable, &etcdpb.AuthEnableRequest{})
}

// enableEtcdAuth makes root a user of etcd's Auth, and from then on asks who calls.
func (h *house) enableEtcdAuth() {
	a := etcdpb.NewAuthClient(h.public)
	do(h, a.RoleAdd, &etcdpb.AuthRoleAddRequest{Name: "root"})
	do(h, a.UserAdd, &etcdpb.AuthUserAddRequest{Name: "root", Password: secret})
	do(h, a.UserGrantRole, &etcdpb.AuthUserGrantRoleRequest{User: "root", Role: "root"})
	do(h, a.AuthEnable, &etcdpb.AuthEnableRequest{})
}

// showCertificates calls the listeners whose callers prove themselves by certificate. A token is worth nothing there.
func (h *house) showCertificates(b *table, all map[string][]endpoint, rows map[string]row, tokens *purse) {
	sys := tokens.of(columnNamed("system:admin"), row{})
	for _, d := range h.doors {
		kind := byCertificate[d.name]
		if kind == "" {
			continue
		}
		fmt.Fprintf(&b.text, "\n# %s, by certificate\n", d.name)
		for _, e := range all[d.name] {
			r := rows[e.row]
			var said []string
			for _, shown := range certificates {
				b.cells++
				v := visit{endpoint: e, conn: h.dial(d.address, shown.creds(h)), body: h.fill(r.ask, asWritten)}
				if shown.token {
					v.token = sys
				}
				got, _ := h.outcome(v)
				v.conn.Close()
				if want := shown.want(kind, r); got != want {
					b.wrong++
					b.complain("%s on %s with %s: got %s, want %s", e.name, d.name, shown.name, got, want)
				}
				said = append(said, fmt.Sprintf("    %s: %s\n", shown.name, got))
			}
			fmt.Fprintf(&b.text, "%s\n%s", e.name, strings.Join(said, ""))
			for _, x := range r.but {
				fmt.Fprintf(&b.text, "    (%s)\n", x.why)
			}
		}
	}
}

// certificates are what callers show where that is asked for. A connection that TLS refuses is UNAVAILABLE.
var certificates = []struct {
	name  string
	creds func(h *house) credentials.TransportCredentials
	// token is set for who shows that of system:admin too.
	token bool
	want  func(kind class, r row) string
}{
	{"no certificate", func(h *house) credentials.TransportCredentials { return h.memberTLS(nil) }, false, without},
	{"no certificate, the token of system:admin", func(h *house) credentials.TransportCredentials { return h.memberTLS(nil) }, true, without},
	{"no TLS", func(*house) credentials.TransportCredentials { return insecure.NewCredentials() }, true, only("")},
	{"another cluster's certificate", func(h *house) credentials.TransportCredentials { return h.memberTLS(h.outsider) }, true, only("")},
	{"a host's certificate", func(h *house) credentials.TransportCredentials { return h.memberTLS(h.host) }, false, only(hosts)},
	{"a member's certificate", func(h *house) credentials.TransportCredentials { return h.memberTLS(h.peerCertificate()) }, false, only(peers)},
}

// only lets in where callers of a kind are let in.
func only(let class) func(class, row) string {
	return func(kind class, r row) string {
		if kind == let {
			return r.right
		}
		return "UNAVAILABLE"
	}
}

// without is what whoever shows no certificate is answered: a member's port does not even talk to them.
func without(kind class, r row) string {
	for _, x := range r.but {
		if slices.Contains(x.columns, "no certificate") {
			return x.answer
		}
	}
	if kind == peers {
		return "UNAVAILABLE"
	}
	return "UNAUTHENTICATED"
}
