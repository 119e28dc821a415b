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

// matrix collects the text of the golden file of the authorization matrix and the problems that were found. cells and
// wrong count all outcomes and the unexpected ones.
type matrix struct {
	text         strings.Builder
	cells, wrong int
	problems     []string
}

func (b *matrix) addProblem(format string, args ...any) {
	b.problems = append(b.problems, fmt.Sprintf(format, args...))
}

// TestAuthorizationMatrix calls every endpoint of every listener of a running member with every kind of token or
// certificate. Each outcome must be the one that follows from the hand-written testdata/authorized_callers.txt. The
// test also fails for an endpoint without a class, a row or a line there, and for a row, a line or a rule without an
// endpoint.
func TestAuthorizationMatrix(t *testing.T) {
	h := startMember(t)
	h.createResources()
	b := &matrix{}
	b.text.WriteString(legend())
	all, rows := listEndpoints(b, h.listeners)
	require.Empty(t, b.problems, "there must be no endpoint without a class or a row, and no row, line or rule without an endpoint")

	// Before etcd's Auth is enabled, etcd's API has other rules; TestAdministrationRequiresACredential tests those.
	tokens := &tokenCache{h, map[string]string{}}
	for _, etcdToo := range []bool{false, true} {
		if etcdToo {
			h.enableEtcdAuth()
		}
		for _, d := range h.listeners {
			if byCertificate[d.name] == "" && (d.grpc != nil || !etcdToo) {
				h.callWithTokens(b, d, all[d.name], rows, tokens, etcdToo)
			}
		}
	}
	h.callWithCertificates(b, all, rows, tokens)

	for _, c := range b.problems {
		t.Error(c)
	}
	h.checkAuditHasNoSecrets(tokens)
	endpoints, cells := 0, 0
	for name, of := range all {
		endpoints += len(of)
		if byCertificate[name] != "" {
			cells += len(of) * len(certificates)
		} else {
			cells += len(of) * len(columns)
		}
	}
	require.Equal(t, cells, b.cells, "no cell may be missing")
	t.Logf("%d endpoints, %d cells, %d wrong", endpoints, b.cells, b.wrong)
	fmt.Fprintf(&b.text, "%d endpoints, %d cells\n", endpoints, b.cells)
	if !t.Failed() {
		h.compareWithGolden(b.text.String())
	}
}

func (h *testMember) compareWithGolden(text string) {
	const file = "testdata/authorization_matrix.txt"
	if *rewrite {
		require.NoError(h.t, os.MkdirAll("testdata", 0o755))
		require.NoError(h.t, os.WriteFile(file, []byte(text), 0o644))
		return
	}
	want, err := os.ReadFile(file)
	require.NoError(h.t, err)
	require.Equal(h.t, string(want), text, "the authorization matrix has changed: check the difference, then run with -rewrite")
}

// listEndpoints returns the endpoints by listener, and the rows by name. It adds a problem for each endpoint, row, line
// or rule without its counterparts.
func listEndpoints(b *matrix, listeners []boundListener) (all map[string][]endpoint, rows map[string]row) {
	rows, used, served := map[string]row{}, map[string]bool{}, map[auth.Method]bool{}
	for _, part := range [][]row{computeRows, identityRows, creditRows, networkRows, restRows, restRPCRows, etcdRows, certifiedRows} {
		for _, r := range part {
			if _, twice := rows[r.name]; twice {
				b.addProblem("%s has two rows", r.name)
			}
			r.order = len(rows)
			rows[r.name] = r
		}
	}
	all = map[string][]endpoint{}
	lines, err := parseAccess(authorizedCallers)
	if err != nil {
		b.addProblem("%s: %v", callersFile, err)
	}
	for _, d := range listeners {
		found, err := d.endpoints()
		if err != nil {
			b.addProblem("%v", err)
		}
		all[d.name] = found
		for i, e := range found {
			access, known := lines[e.row]
			if !known {
				b.addProblem("%s has no line in %s", e.row, callersFile)
			}
			e.access = access
			found[i] = e
			if e.class == "" {
				b.addProblem("%s has neither a rule nor a reason why it is open", e.name)
			}
			if r, ok := rows[e.row]; !ok {
				b.addProblem("%s has no row", e.row)
			} else if slices.Contains(refusals(e, r), r.allowed) {
				b.addProblem("%s: the outcome for authorized callers, %s, does not differ from a refusal", e.name, r.allowed)
			}
			used[e.row] = true
			if e.class == ruled {
				served[e.ruleMethod] = true
			}
		}
	}
	for name := range rows {
		if !used[name] {
			b.addProblem("%s has a row but is not served", name)
		}
	}
	for name := range lines {
		if !used[name] {
			b.addProblem("%s has a line in %s but is not served", name, callersFile)
		}
	}
	for method := range auth.Rules() {
		if !served[method] {
			b.addProblem("%s has a rule but is not served", method)
		}
	}
	for method := range auth.Open {
		if _, too := auth.Rules()[method]; too || !used[string(method)] {
			b.addProblem("%s is listed as open, but has a rule or is not served", method)
		}
	}
	return all, rows
}

// refusals returns the outcomes of the endpoint for callers who are not authorized. row.allowed must differ from them.
func refusals(e endpoint, r row) []string {
	isREST := e.method != ""
	switch {
	case e.access.allows(callerMember):
		return []string{"UNAVAILABLE"}
	case e.access.allows(callerEtcdUser) && !e.access.allows(callerAnonymous):
		return []string{unauthenticated[false], "INVALID_ARGUMENT"}
	case e.access.byRole():
		return []string{unauthenticated[isREST], denied[isREST]}
	case isREST:
		return nil
	}
	return []string{unauthenticated[false]}
}

// callWithTokens calls endpoints of one listener with each kind of token: those of etcd's API if etcdToo is set, and
// all others otherwise.
func (h *testMember) callWithTokens(b *matrix, d boundListener, endpoints []endpoint, rows map[string]row, tokens *tokenCache, etcdToo bool) {
	var conn *grpc.ClientConn
	if d.grpc != nil {
		conn = h.dial(d.address, insecure.NewCredentials())
	}
	order := slices.DeleteFunc(slices.Clone(endpoints), func(e endpoint) bool { return (e.class == etcd) != etcdToo })
	// Call the endpoints in the order of their rows, because some rows undo changes of earlier ones.
	slices.SortFunc(order, func(a, b endpoint) int { return rows[a.row].order - rows[b.row].order })
	if len(order) == 0 {
		return
	}
	fmt.Fprintf(&b.text, "\n# %s\n", d.name)
	for _, e := range order {
		r := rows[e.row]
		var cells []string
		for _, c := range columns {
			got := h.callWithToken(b, call{endpoint: e, conn: conn, token: tokens.token(c, r), drain: r.drain}, r, c)
			cells = append(cells, cellText(got, r, e.method != ""))
		}
		b.writeRow(e, r, cells)
	}
}

// callWithToken calls one endpoint with the token of column c, compares the outcome with the expected one, and returns
// it.
func (h *testMember) callWithToken(b *matrix, v call, r row, c column) (got string) {
	// theirs is set if the caller may learn which resources of project web exist. All projects of an org share the
	// org's resources.
	theirs := c.user.role == cloud.SystemAdmin || c.kind == roleHere || c.user.at.Org == web.Org && v.access.about == aboutOrg
	how := fillAllWithExisting
	if theirs {
		how = fillAsWritten
	}
	h.fillRequest(&v, r, c, how)
	got, message := h.outcome(v)
	b.cells++
	if want := expected(v.endpoint, r, c); got != want {
		b.wrong++
		b.addProblem("%s with %s: got %s, want %s", v.name, c.name, got, want)
	}
	if c.kind == otherTenantByID && !theirs {
		h.fillRequest(&v, r, c, fillAllWithMissing)
		if _, otherwise := h.outcome(v); h.withoutResourceIDs(message) != h.withoutResourceIDs(otherwise) {
			b.addProblem("%s with %s reveals whether a resource exists: %q, but otherwise %q", v.name, c.name, message, otherwise)
		}
	}
	if v.method == http.MethodGet {
		v.method = http.MethodHead
		if head, _ := h.outcome(v); head != got[:3] {
			b.addProblem("%s with %s: %s, but HEAD %s", v.name, c.name, got, head)
		}
	}
	if r.cleanup != nil {
		r.cleanup(h)
	}
	return got
}

// fillRequest sets the path and body of a call from the row, as column c requires.
func (h *testMember) fillRequest(v *call, r row, c column, how placeholderMode) {
	v.path, v.body = h.fillPlaceholders(r.path, how), h.fillPlaceholders(r.body, how)
	if c.kind == otherTenantByID || c.kind == cloudAdminNamingNone {
		v.body = withoutTenantFields(h, v.body)
	}
}

// withoutResourceIDs replaces the IDs of existing resources in a message by missingID, so that messages can be
// compared.
func (h *testMember) withoutResourceIDs(message string) string {
	for _, name := range tenantResources {
		message = strings.ReplaceAll(message, h.resources[name], missingID)
	}
	return message
}

// writeRow writes the outcomes of one endpoint and the reasons of its exceptions to the golden file's text.
func (b *matrix) writeRow(e endpoint, r row, cells []string) {
	name := strings.TrimPrefix(e.name, e.listener.name+" ")
	fmt.Fprintf(&b.text, "%-62s", name)
	for _, c := range cells {
		fmt.Fprintf(&b.text, " %-4s", c)
	}
	fmt.Fprintf(&b.text, "  %s\n", r.allowed)
	for _, x := range r.exceptions {
		fmt.Fprintf(&b.text, "    %s: %s, since %s\n", strings.Join(x.columns, ", "), x.answer, x.why)
	}
}

// cellText returns the short form of an outcome that the golden file contains.
func cellText(outcome string, r row, isREST bool) string {
	switch outcome {
	case r.allowed:
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
	b.WriteString(`Every endpoint of a member × every kind of token. Written by go test ./controlplane -run TestAuthorizationMatrix -rewrite.

=  the answer to an authorized caller, given at the end of the line
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
are roles in that project, and last tokens that are not limited to a project. testdata/authorized_callers.txt says who may
call each endpoint, and is written by hand. etcd's API is called with its Auth enabled:
before that, callers on loopback may use keys and read without a token; changes of the cluster and of Auth take one.

`)
	fmt.Fprintf(&b, "%-62s", "")
	for _, c := range columns {
		fmt.Fprintf(&b, " %-4s", c.short)
	}
	b.WriteString("\n")
	return b.String()
}

// reenableEtcdAuth enables etcd's Auth again after a call of AuthDisable.
func reenableEtcdAuth(h *testMember) {
	mustCall(h, etcdpb.NewAuthClient(h.public).AuthEnable, &etcdpb.AuthEnableRequest{})
}

// enableEtcdAuth creates etcd's user root with the role root, and enables etcd's Auth.
func (h *testMember) enableEtcdAuth() {
	a := etcdpb.NewAuthClient(h.public)
	mustCall(h, a.RoleAdd, &etcdpb.AuthRoleAddRequest{Name: "root"})
	mustCall(h, a.UserAdd, &etcdpb.AuthUserAddRequest{Name: "root", Password: secret})
	mustCall(h, a.UserGrantRole, &etcdpb.AuthUserGrantRoleRequest{User: "root", Role: "root"})
	mustCall(h, a.AuthEnable, &etcdpb.AuthEnableRequest{})
}

// callWithCertificates calls the endpoints whose callers authenticate with certificates, with each kind of certificate.
// Tokens must give no access there.
func (h *testMember) callWithCertificates(b *matrix, all map[string][]endpoint, rows map[string]row, tokens *tokenCache) {
	sys := tokens.token(columnNamed("system:admin"), row{})
	for _, d := range h.listeners {
		kind := byCertificate[d.name]
		if kind == "" {
			continue
		}
		fmt.Fprintf(&b.text, "\n# %s, by certificate\n", d.name)
		for _, e := range all[d.name] {
			r := rows[e.row]
			var lines []string
			for _, shown := range certificates {
				b.cells++
				v := call{endpoint: e, conn: h.dial(d.address, shown.creds(h)), body: h.fillPlaceholders(r.body, fillAsWritten)}
				if shown.token {
					v.token = sys
				}
				got, _ := h.outcome(v)
				v.conn.Close()
				if want := shown.want(kind, e.access, r); got != want {
					b.wrong++
					b.addProblem("%s on %s with %s: got %s, want %s", e.name, d.name, shown.name, got, want)
				}
				lines = append(lines, fmt.Sprintf("    %s: %s\n", shown.name, got))
			}
			fmt.Fprintf(&b.text, "%s\n%s", e.name, strings.Join(lines, ""))
			for _, x := range r.exceptions {
				fmt.Fprintf(&b.text, "    (%s)\n", x.why)
			}
		}
	}
}

// certificates lists the kinds of client certificates with which endpoints are called. The outcome is UNAVAILABLE if
// the TLS handshake fails.
var certificates = []struct {
	name  string
	creds func(h *testMember) credentials.TransportCredentials
	// token makes the call send the token of system:admin as well.
	token bool
	want  func(kind authClass, a access, r row) string
}{
	{"no certificate", func(h *testMember) credentials.TransportCredentials { return h.memberTLS(nil) }, false, wantWithoutCertificate},
	{"no certificate, the token of system:admin", func(h *testMember) credentials.TransportCredentials { return h.memberTLS(nil) }, true, wantWithoutCertificate},
	{"no TLS", func(*testMember) credentials.TransportCredentials { return insecure.NewCredentials() }, true, wantFrom("")},
	{"another cluster's certificate", func(h *testMember) credentials.TransportCredentials { return h.memberTLS(h.outsider) }, true, wantFrom("")},
	{"a host's certificate", func(h *testMember) credentials.TransportCredentials { return h.memberTLS(h.host) }, false, wantFrom(callerHost)},
	{"a member's certificate", func(h *testMember) credentials.TransportCredentials { return h.memberTLS(h.peerCertificate()) }, false, wantFrom(callerMember)},
}

// wantFrom returns a function that returns the expected outcome with a certificate of the given kind of caller. For
// endpoints that do not allow this kind, the outcome is UNAVAILABLE, because the port refuses the connection.
func wantFrom(caller string) func(authClass, access, row) string {
	return func(_ authClass, a access, r row) string {
		if a.allows(caller) {
			return r.allowed
		}
		return "UNAVAILABLE"
	}
}

// wantWithoutCertificate returns the expected outcome of a call without a client certificate. The port for members
// refuses such a connection.
func wantWithoutCertificate(kind authClass, a access, r row) string {
	switch {
	case a.allows(callerJoinToken):
		return r.allowed
	case kind == peers:
		return "UNAVAILABLE"
	}
	return "UNAUTHENTICATED"
}
