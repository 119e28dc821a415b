package main

import (
	"bytes"
	"cmp"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"slices"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// testUser is a user with at most one role, in one tenant.
type testUser struct {
	name string
	role cloud.Role
	at   cloud.Tenant
}

// testUsers lists one user for each role in project web, one user without a role, and two users with a role in another
// tenant.
var testUsers = []testUser{
	{"sys", cloud.SystemAdmin, cloud.Tenant{}}, {"orga", cloud.OrgAdmin, web}, {"padm", cloud.ProjectAdmin, web},
	{"memb", cloud.ProjectMember, web}, {"view", cloud.ProjectViewer, web}, {"bill", cloud.BillingAdmin, cloud.Tenant{}},
	{name: "nobody"}, {"neighbour", cloud.ProjectAdmin, shop}, {"stranger", cloud.OrgAdmin, lab},
}

// serviceAccount is the service account of project web.
var serviceAccount = testUser{"robot", cloud.ProjectMember, web}

func (p testUser) binding() *identityv1.Binding {
	b := &identityv1.Binding{Role: string(p.role), OrgId: string(p.at.Org), ProjectId: string(p.at.Project)}
	switch p.role {
	case "":
		return nil
	case cloud.OrgAdmin:
		b.ProjectId = ""
	}
	return b
}

// tokenKind is the kind of token that the calls of a column send.
type tokenKind uint8

const (
	noToken              tokenKind = iota
	invalidToken                   // a token that is forged, revoked, expired, or not valid yet
	unprovenToken                  // a valid token that was issued without authentication
	provenWithoutRole              // a valid token of a user without a role
	otherTenant                    // a token of a user with a role in another tenant; the request names project web
	otherTenantByID                // a token of a user with a role in another tenant; the request names no tenant
	roleHere                       // a token of a user with a role in project web
	cloudAdmin                     // an administrator's token for the entire cloud; the request names project web
	cloudAdminNamingNone           // an administrator's token for the entire cloud; the request names no tenant
	cloudBilling                   // a token of billing:admin for the entire cloud; the request names project web
)

// column is a column of the authorization matrix: the calls with one kind of token of one holder.
type column struct {
	name, short string
	kind        tokenKind
	// user is the token's holder, for the kinds of valid tokens.
	user testUser
	// make creates the token, for the kind invalidToken.
	make func(h *testMember) string
}

// columns lists the columns of the authorization matrix. Each invalid token would be a valid administrator's token for
// project web if it did not have exactly one defect.
var columns = []column{
	{name: "no token", short: "none"},
	{name: "garbage", short: "garb", kind: invalidToken, make: func(*testMember) string { return "garbage" }},
	{name: "revoked", short: "revd", kind: invalidToken, make: (*testMember).revokedToken},
	{name: "expired", short: "expd", kind: invalidToken, make: func(h *testMember) string { return h.hostToken(web, time.Now().Add(-2*time.Hour), time.Hour) }},
	{name: "not yet valid", short: "soon", kind: invalidToken, make: func(h *testMember) string { return h.hostToken(web, time.Now().Add(time.Hour), time.Hour) }},
	{name: "wrong alg", short: "alg", kind: invalidToken, make: func(h *testMember) string {
		return forgedToken{alg: jose.HS256, key: []byte(h.hostKey().Public().(ed25519.PublicKey)), kid: "host", aud: token.Audience}.make(h)
	}},
	{name: "alg none", short: "unsg", kind: invalidToken, make: (*testMember).unsignedToken},
	{name: "wrong kid", short: "kid", kind: invalidToken, make: func(h *testMember) string {
		return forgedToken{alg: jose.EdDSA, key: h.hostKey(), kid: h.primaryKeyID(), aud: token.Audience}.make(h)
	}},
	{name: "wrong key", short: "key", kind: invalidToken, make: func(h *testMember) string {
		_, mine, err := ed25519.GenerateKey(nil)
		require.NoError(h.t, err)
		return forgedToken{alg: jose.EdDSA, key: mine, kid: "host", aud: token.Audience}.make(h)
	}},
	{name: "wrong aud", short: "aud", kind: invalidToken, make: func(h *testMember) string {
		return forgedToken{alg: jose.EdDSA, key: h.hostKey(), kid: "host", aud: "billing"}.make(h)
	}},
	{name: "unproven", short: "unpr", kind: unprovenToken},
	{name: "proven without role", short: "norl", kind: provenWithoutRole, user: testUsers[6]},
	{name: "other project", short: "proj", kind: otherTenant, user: testUsers[7]},
	{name: "other org", short: "org", kind: otherTenant, user: testUsers[8]},
	{name: "other project, by id", short: "pid", kind: otherTenantByID, user: testUsers[7]},
	{name: "other org, by id", short: "oid", kind: otherTenantByID, user: testUsers[8]},
	{name: "system:admin", short: "sysa", kind: roleHere, user: testUsers[0]},
	{name: "org:admin", short: "orga", kind: roleHere, user: testUsers[1]},
	{name: "project:admin", short: "prja", kind: roleHere, user: testUsers[2]},
	{name: "project:member", short: "memb", kind: roleHere, user: testUsers[3]},
	{name: "project:viewer", short: "view", kind: roleHere, user: testUsers[4]},
	{name: "billing:admin", short: "bill", kind: roleHere, user: testUsers[5]},
	{name: "service account", short: "acct", kind: roleHere, user: serviceAccount},
	{name: "system:admin of no project", short: "sysc", kind: cloudAdmin, user: testUsers[0]},
	{name: "system:admin of no project, naming none", short: "sysn", kind: cloudAdminNamingNone, user: testUsers[0]},
	{name: "billing:admin of no project", short: "bilc", kind: cloudBilling, user: testUsers[5]},
}

func columnNamed(name string) column {
	return columns[slices.IndexFunc(columns, func(c column) bool { return c.name == name })]
}

// tokenCache creates each token when it is first used, and then reuses it.
type tokenCache struct {
	h      *testMember
	tokens map[string]string
}

// token returns the token with which the endpoint of row r is called for column c, or "" for no token.
func (p *tokenCache) token(c column, r row) string {
	scope := r.scope(web)
	switch c.kind {
	case otherTenant, otherTenantByID:
		scope = r.scope(c.user.at)
	case invalidToken, unprovenToken:
		scope = web
	case cloudAdmin, cloudAdminNamingNone, cloudBilling:
		scope = cloud.Tenant{}
	case noToken:
		return ""
	}
	key := cmp.Or(c.user.name, c.name) + " " + scope.String()
	if p.tokens[key] == "" {
		switch c.kind {
		case invalidToken:
			p.tokens[key] = c.make(p.h)
		case unprovenToken:
			p.tokens[key] = p.h.unprovenToken()
		case provenWithoutRole:
			// IssueToken refuses a scope in which the user has no role. The REST token endpoint of the wire contract
			// issues such a token.
			p.tokens[key] = p.h.restToken(c.user.name, secret, scope)
		default:
			p.tokens[key] = p.h.login(c.user.name, scope)
		}
	}
	return p.tokens[key]
}

// login returns a token that IssueToken issues for a user's or the service account's password.
func (h *testMember) login(user string, scope cloud.Tenant) string {
	username, word := user, secret
	if user == serviceAccount.name {
		username, word = h.resources["account"], h.resources["key"]
	}
	got, err := identityv1.NewIdentityServiceClient(h.public).IssueToken(h.callContext(), &identityv1.IssueTokenRequest{
		Username: username, Password: word, OrgId: string(scope.Org), ProjectId: string(scope.Project),
	})
	require.NoError(h.t, err)
	return got.GetToken()
}

// unprovenToken returns an unauthenticated token, which the REST token endpoint of the wire contract issues for a wrong
// password.
func (h *testMember) unprovenToken() string {
	return h.restToken("sys", wrongSecret, web)
}

// restToken returns a token from the REST token endpoint of the wire contract.
func (h *testMember) restToken(user, password string, scope cloud.Tenant) string {
	ask, err := json.Marshal(map[string]string{
		"username": user, "password": password, "org_id": string(scope.Org), "project_id": string(scope.Project),
	})
	require.NoError(h.t, err)
	var answer struct{ Data struct{ Token string } }
	h.http(http.MethodPost, "/api/v1/auth/token", ask, &answer)
	require.NotEmpty(h.t, answer.Data.Token)
	return answer.Data.Token
}

// primaryKeyID returns the ID of the key with which new tokens are signed.
func (h *testMember) primaryKeyID() string {
	keys := mustCall(h, identityv1.NewIdentityServiceClient(h.public).ListKeys, &identityv1.ListKeysRequest{})
	for _, k := range keys.GetKeys() {
		if k.GetUse() == "primary" {
			return k.GetId()
		}
	}
	h.t.Fatal("no primary key")
	return ""
}

// http calls the REST API of the identity service and decodes the JSON response into the argument into.
func (h *testMember) http(method, path string, body []byte, into any) {
	r, err := http.NewRequestWithContext(h.callContext(), method, "http://"+h.config.Address(h.config.Ports.Identity)+path, bytes.NewReader(body))
	require.NoError(h.t, err)
	r.Header.Set("Content-Type", "application/json")
	got, err := http.DefaultClient.Do(r)
	require.NoError(h.t, err)
	defer got.Body.Close()
	require.NoError(h.t, json.NewDecoder(got.Body).Decode(into))
}

func (h *testMember) revokedToken() string {
	text := h.login("sys", web)
	_, err := identityv1.NewIdentityServiceClient(h.public).RevokeToken(h.contextWithToken(text), &identityv1.RevokeTokenRequest{Token: text})
	require.NoError(h.t, err)
	return text
}

func (h *testMember) hostKey() ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed(h.key.Derive("host-token"))
}

// forgedToken describes an administrator's token that the test signs itself, with the given algorithm, key, key ID and
// audience.
type forgedToken struct {
	alg jose.SignatureAlgorithm
	key any
	kid string
	aud string
}

func (f forgedToken) make(h *testMember) string {
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: f.alg, Key: f.key}, (&jose.SignerOptions{}).WithHeader("kid", f.kid))
	require.NoError(h.t, err)
	text, err := jwt.Signed(signer).Claims(h.claims(f.aud)).Serialize()
	require.NoError(h.t, err)
	return text
}

// unsignedToken returns an administrator's token with the algorithm "none" and no signature.
func (h *testMember) unsignedToken() string {
	claims, err := json.Marshal(h.claims(token.Audience))
	require.NoError(h.t, err)
	return base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none","kid":"host"}`)) + "." + base64.RawURLEncoding.EncodeToString(claims) + "."
}

func (h *testMember) claims(audience string) token.Claims {
	now := time.Now()
	return token.Claims{
		Claims: jwt.Claims{
			Issuer: "urn:trivet:" + h.key.Cluster(), Subject: "admin", ID: "by-hand", Audience: jwt.Audience{audience},
			IssuedAt: jwt.NewNumericDate(now), Expiry: jwt.NewNumericDate(now.Add(time.Hour)),
		},
		Cluster: h.key.Cluster(), Kind: token.User, Scope: token.ScopeOf(web), Proof: cloud.ProofHostKey, At: now.UnixMilli(),
	}
}
