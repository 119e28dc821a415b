package main

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/cli/openid/openidtest"
	"github.com/trivet-cloud/trivet/cli/session"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// browser is the program's standard error. It opens the first URL that the program prints, as a user would with a
// browser, and stores the resulting page.
type browser struct {
	bytes.Buffer
	page string
	wg   sync.WaitGroup
	once sync.Once
}

var address = regexp.MustCompile(`(?m)^  (http://\S+)$`)

func (b *browser) Write(p []byte) (int, error) {
	n, err := b.Buffer.Write(p)
	if found := address.FindStringSubmatch(b.String()); found != nil {
		b.once.Do(func() {
			b.wg.Go(func() {
				resp, err := http.Get(found[1])
				if err != nil {
					b.page = err.Error()
					return
				}
				defer resp.Body.Close()
				text, _ := io.ReadAll(resp.Body) // after an error, the page is checked as far as it was read
				b.page = string(text)
			})
		})
	}
	return n, err
}

// TestLoginAtAProvider logs in through an OpenID provider. It checks the request to the control plane and the saved
// context, that a second login replaces the token of that context, and that no output contains an ID token.
func TestLoginAtAProvider(t *testing.T) {
	p := openidtest.New(t, now)
	cloud := newCloud(t, nil, "a")
	cloud.people.providers = []*identityv1.LoginProvider{{Name: "corp", Issuer: p.Issuer, ClientId: p.ClientID, Scopes: []string{"openid", "email"}}}
	home := t.TempDir()
	trivet := func(line string) (out, errs string, code int) {
		var stdout bytes.Buffer
		stderr := &browser{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		code = run(ctx, session.Shell{
			Args: words(line), Env: func(k string) string { return map[string]string{"HOME": home, "TRIVET_INSECURE_PLAINTEXT": "true"}[k] }, Stdin: strings.NewReader(""),
			Stdout: &stdout, Stderr: stderr, Now: func() time.Time { return now }, Dialer: cloud.dial,
		})
		stderr.wg.Wait()
		for _, id := range append(p.Issued(), oidcToken) {
			require.NotContains(t, stdout.String()+stderr.String()+stderr.page, id)
		}
		return stdout.String(), stderr.String(), code
	}
	out, errs, code := trivet("login --provider corp --endpoint a --org acme --project web --ttl 2h")
	require.Zero(t, code, errs)
	require.Equal(t, "logged in to a:50051 as ada until 2026-03-01T13:00:00Z; the context is ada/web@a\n", out)

	in := cloud.people.vouched
	require.Equal(t, "corp acme web", strings.Join([]string{in.GetProvider(), in.GetOrgId(), in.GetProjectId()}, " "))
	require.Equal(t, uint64(7200), in.GetTtlSeconds())
	provider, err := oidc.NewProvider(t.Context(), p.Issuer)
	require.NoError(t, err)
	id, err := provider.Verifier(&oidc.Config{ClientID: p.ClientID, Now: func() time.Time { return now }}).Verify(t.Context(), in.GetIdToken())
	require.NoError(t, err)
	require.Equal(t, p.Subject, id.Subject)
	require.Equal(t, id.Nonce, in.GetNonce())
	require.NotEmpty(t, id.Nonce)

	b, err := account.Load(filepath.Join(home, ".config/trivet/config.yaml"))
	require.NoError(t, err)
	require.Equal(t, &account.Book{Current: "ada/web@a", Contexts: map[string]*account.Login{"ada/web@a": {
		Endpoints: []string{"a:50051"}, User: "ada", Provider: "corp", Org: "acme", Project: "web", Token: oidcToken, ExpiresAt: now.Add(time.Hour), Plaintext: true,
	}}}, b)
	text, err := os.ReadFile(filepath.Join(home, ".config/trivet/config.yaml"))
	require.NoError(t, err)
	require.NotContains(t, string(text), in.GetIdToken(), "the ID token must not be saved")

	// A login without flags uses the provider of the saved context.
	out, errs, code = trivet("login")
	require.Zero(t, code, errs)
	require.Contains(t, out, "the context is ada/web@a")
	require.Len(t, p.Issued(), 2)
	require.Equal(t, "web", cloud.people.vouched.GetProjectId())

	_, errs, code = trivet("login --provider other")
	require.Equal(t, 3, code)
	require.Contains(t, errs, `NOT_FOUND: no provider named "other"`)
	out, _, code = trivet("__complete login --provider ''")
	require.Zero(t, code)
	require.Contains(t, out, "corp\n")

	p.Claims = func(c map[string]any) { c["nonce"] = "another login's" }
	_, errs, code = trivet("login")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "it is not for this login")
	again, err := account.Load(filepath.Join(home, ".config/trivet/config.yaml"))
	require.NoError(t, err)
	require.Equal(t, b, again)
}

// TestLogoutKeepsNewerLogin checks that a logout does not remove a token that another login saved while the logout ran.
func TestLogoutKeepsNewerLogin(t *testing.T) {
	cloud := newCloud(t, nil, "a")
	home := t.TempDir()
	path := filepath.Join(home, ".config/trivet/config.yaml")
	put := func(token account.Secret) {
		assert.NoError(t, account.Update(t.Context(), path, func(b *account.Book) error {
			b.Current = "x"
			b.Contexts["x"] = &account.Login{Endpoints: []string{"a:50051"}, Token: token, ExpiresAt: now.Add(time.Hour)}
			return nil
		}))
	}
	put(tenantToken)
	cloud.people.revoking = func() { put(issuedToken) }
	var out, errs bytes.Buffer
	require.Zero(t, run(t.Context(), session.Shell{
		Args: []string{"logout"}, Env: func(k string) string { return map[string]string{"HOME": home, "TRIVET_INSECURE_PLAINTEXT": "true"}[k] }, Stdin: strings.NewReader(""),
		Stdout: &out, Stderr: &errs, Now: func() time.Time { return now }, Dialer: cloud.dial,
	}), errs.String())
	b, err := account.Load(path)
	require.NoError(t, err)
	require.Equal(t, account.Secret(issuedToken), b.Contexts["x"].Token)
	require.Equal(t, map[string]string{tenantToken: "demo"}, cloud.people.ended)
}
