package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/cli/openid/openidtest"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

// everyMember lists all members, as a value of the flag --endpoint.
const everyMember = "127.0.0.1,127.0.0.2,127.0.0.3"

// somebody is a person who uses the program trivet, with their own home directory.
type somebody struct {
	w    *world
	ctx  context.Context
	home string
	// The field as holds flags that the methods does and cannot put before the arguments of each command.
	as []string
}

// The method does runs trivet with arguments, checks that trivet succeeds, and returns its standard output.
func (p *somebody) does(args ...string) string {
	p.w.t.Helper()
	out, errs, code := p.w.trivet(p.ctx, p.home, append(p.as, args...)...)
	require.Zero(p.w.t, code, "trivet %s: %s%s", strings.Join(args, " "), out, errs)
	return out
}

// The method cannot runs trivet with arguments. It checks that trivet fails with the exit code 1, 3 or 5, and with an
// error that contains the text want.
func (p *somebody) cannot(want string, args ...string) {
	p.w.t.Helper()
	out, errs, code := p.w.trivet(p.ctx, p.home, append(p.as, args...)...)
	require.Contains(p.w.t, []int{1, 3, 5}, code, "trivet %s: %s%s", strings.Join(args, " "), out, errs)
	require.Contains(p.w.t, errs, want)
}

// writes creates a file with a line of text and mode 0600 in the home directory, and returns its path.
func (p *somebody) writes(name, text string) string {
	path := filepath.Join(p.home, name)
	require.NoError(p.w.t, os.WriteFile(path, []byte(text+"\n"), 0o600))
	return path
}

// browses runs `trivet login` with arguments for an OpenID provider. It opens the printed address as a browser would,
// and returns the standard output.
func (p *somebody) browses(args ...string) string {
	cmd := exec.CommandContext(p.ctx, p.w.trio.Bin.CLI, append([]string{"login"}, args...)...)
	cmd.Env = []string{"HOME=" + p.home, "XDG_CONFIG_HOME=" + p.home}
	var out, errs strings.Builder
	cmd.Stdout = &out
	said, err := cmd.StderrPipe()
	require.NoError(p.w.t, err)
	require.NoError(p.w.t, cmd.Start())
	address := regexp.MustCompile(`^  (http://\S+)$`)
	for lines := bufio.NewScanner(said); lines.Scan(); {
		errs.WriteString(lines.Text() + "\n")
		if found := address.FindStringSubmatch(lines.Text()); found != nil {
			resp, err := http.Get(found[1])
			require.NoError(p.w.t, err)
			require.NoError(p.w.t, resp.Body.Close())
		}
	}
	require.NoError(p.w.t, cmd.Wait(), errs.String())
	return out.String()
}

// TestCommandLineIdentity checks that an administrator can create and delete a tenant with the program trivet alone. It
// checks that the tenant's user can log in with a password and through an OpenID provider, and can do what quota and
// roles allow but nothing else.
func TestCommandLineIdentity(t *testing.T) {
	provider := openidtest.New(t, time.Now())
	w := newWorld(t, func(w *world) {
		config := fmt.Sprintf("identity:\n  providers:\n    - name: corp\n      issuer: %s\n      client_id: %s\n", provider.Issuer, provider.ClientID)
		require.NoError(t, os.WriteFile(w.dir.Path("identity.yaml"), []byte(config), 0o644))
		w.trio.Extra = append(w.trio.Extra, "--config", "identity.yaml")
	})
	ctx := w.context(4 * time.Minute)
	admin := &somebody{w: w, ctx: ctx, home: t.TempDir()}
	admin.as = []string{"--endpoint", everyMember, "--token-file", admin.writes("admin.token", w.adminToken)}
	ada := &somebody{w: w, ctx: ctx, home: t.TempDir()}

	admin.does("org", "create", "acme", "--name", "Acme Corp.")
	admin.does("project", "create", "web", "--org", "acme", "--vcpus", "4", "--memory", "4GiB")
	admin.does("quota", "set", "--org", "acme", "--project", "web", "--vms", "2")
	require.Regexp(t, `memory +0 +4 GiB`, admin.does("quota", "show", "--org", "acme", "--project", "web"))
	admin.does("user", "create", "ada", "--name", "Ada Lovelace")
	admin.cannot("credential", "binding", "add", "--user", "ada", "--role", "project:admin", "--org", "acme", "--project", "web")
	admin.does("user", "password", "ada", "--password-file", ada.writes("password", "correct horse"))
	admin.does("binding", "add", "--user", "ada", "--role", "project:admin", "--org", "acme", "--project", "web")
	require.Regexp(t, `ada +project:admin +acme +web`, admin.does("binding", "list", "--org", "acme"))

	// Ada must be able to read her tenant. A call that needs another role must be refused, and be in the audit log.
	require.Contains(t, ada.does("login", "--endpoint", everyMember, "--user", "ada", "--password-file", filepath.Join(ada.home, "password"), "--project", "web"),
		"the context is ada/web@127.0.0.1")
	me := ada.does("whoami")
	require.Regexp(t, `Proven by: +password`, me)
	require.Regexp(t, `Acts in: +acme/web`, me)
	require.Contains(t, me, "project:admin of acme/web")
	require.Contains(t, ada.does("project", "list"), "web")
	require.Equal(t, "acme\n", ada.does("org", "list", "-o", "name"))
	require.Regexp(t, `vms +0 +2\n`, ada.does("quota", "show"))
	ada.cannot("needs one of the roles [system:admin]", "org", "create", "mine")
	require.NoError(t, lab.Until(ctx, "the refusal is in the audit log", func(context.Context) error {
		if !strings.Contains(admin.does("audit", "list", "--user", "ada", "--outcome", "REFUSED", "--since", "10m"), "CreateOrg") {
			return os.ErrNotExist
		}
		return nil
	}))

	// A service account gets a secret and a token, which must work until the token is revoked.
	secret, token := filepath.Join(ada.home, "ci.secret"), filepath.Join(ada.home, "ci.token")
	ci := strings.TrimSpace(ada.does("service-account", "create", "ci", "--role", "project:viewer", "--secret-file", secret, "-o", "name"))
	ada.does("token", "issue", "--user", ci, "--password-file", secret, "--file", token)
	for _, path := range []string{secret, token, filepath.Join(ada.home, "trivet", "config.yaml")} {
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), info.Mode().Perm(), path)
	}
	require.Regexp(t, `Kind: +ServiceAccount`, ada.does("token", "verify", "--file", token))
	require.Equal(t, "ci@acme/web", ci)
	require.Regexp(t, `^[A-Z0-9]{18}\n$`, ada.does("--token-file", token, "whoami", "-o", "name"))
	ada.does("token", "revoke", "--file", token)
	ada.cannot("the token is not valid", "token", "verify", "--file", token)
	ada.does("sa", "delete", "ci")

	// Ada's login must still work after the signing keys were rotated and while a member is down.
	admin.does("key", "rotate", "--force")
	require.Contains(t, admin.does("key", "list"), "secondary")
	require.NoError(t, w.dir.Kill(w.trio.Name(1)))
	ada.does("whoami")
	require.NoError(t, w.trio.StartAll())
	w.ready()

	// A new password must revoke earlier tokens on each member, and a logout must revoke the token and copies of it.
	ada.does("user", "password", "--current-password-file", ada.writes("old", "correct horse"), "--password-file", ada.writes("password", "another horse"))
	for host := range strings.SplitSeq(everyMember, ",") {
		refused(ctx, t, ada, "run `trivet login`", "whoami", "--endpoint", host)
	}
	ada.does("login", "--password-file", filepath.Join(ada.home, "password"))
	stolen := ada.writes("stolen", savedToken(t, ada))
	ada.does("--token-file", stolen, "whoami")
	ada.does("logout")
	for host := range strings.SplitSeq(everyMember, ",") {
		refused(ctx, t, ada, "not accepted", "--token-file", stolen, "--endpoint", host, "whoami")
	}
	ada.cannot("you are not logged in", "whoami")

	w.rivals(admin, filepath.Join(ada.home, "password"))
	w.checkGroupsAndQuotas(admin, filepath.Join(ada.home, "password"))

	// Ada must be able to log in through an OpenID provider when an administrator has linked her identity there.
	admin.does("user", "link", "ada", "--provider", "corp", "--subject", provider.Subject)
	require.Contains(t, ada.browses("--provider", "corp", "--project", "web", "--context", "outside"), "as ada until")
	require.Regexp(t, `Proven by: +oidc`, ada.does("whoami"))
	var contexts struct {
		Items []struct{ Name, State string }
	}
	require.NoError(t, json.Unmarshal([]byte(ada.does("context", "list", "-o", "json")), &contexts))
	require.Equal(t, "[{ada/web@127.0.0.1 LOGGED_OUT} {outside LOGGED_IN}]", fmt.Sprint(contexts.Items))

	// Remove the role, the user, the project and the org. An org with a project must not be deleted.
	admin.does("binding", "remove", "--user", "ada", "--role", "project:admin", "--org", "acme", "--project", "web")
	refused(ctx, t, ada, "no project web", "service-account", "list")
	admin.does("user", "disable", "ada")
	refused(ctx, t, ada, "run `trivet login`", "whoami")
	admin.does("user", "delete", "ada")
	admin.cannot("has", "org", "delete", "acme")
	admin.does("project", "delete", "web")
	admin.does("org", "delete", "acme")
}

// checkGroupsAndQuotas checks that a new project gets the default quota, and that the quota of an org limits its projects. It checks that
// a user has the roles of a group from the next call after joining it, and no longer after leaving it.
func (w *world) checkGroupsAndQuotas(admin *somebody, password string) {
	bob := &somebody{w: w, ctx: admin.ctx, home: w.t.TempDir()}
	admin.does("quota", "update", "--default", "--vms", "1")
	admin.does("org", "create", "teams")
	admin.does("quota", "update", "--org", "teams", "--projects", "1")
	admin.does("project", "create", "shop", "--org", "teams")
	require.Regexp(w.t, `teams/shop +vms +0 +1 `, admin.does("quota", "show", "--org", "teams", "--project", "shop"))
	admin.cannot("projects", "project", "create", "second", "--org", "teams")
	admin.does("quota", "update", "--default", "--vms", "unlimited")

	admin.does("user", "create", "bob", "--org", "teams")
	admin.does("user", "password", "bob", "--password-file", password)
	admin.does("group", "create", "devs", "--org", "teams")
	admin.does("binding", "create", "--group", "devs", "--role", "project:member", "--org", "teams", "--project", "shop")
	admin.does("group", "add", "devs", "bob", "--org", "teams")
	bob.does("login", "--endpoint", everyMember, "--user", "bob", "--password-file", password, "--org", "teams", "--project", "shop")
	require.Contains(w.t, bob.does("whoami"), "project:member of teams/shop")
	bob.does("volume", "create", "data", "--size", "1")
	admin.does("group", "remove", "devs", "bob", "--org", "teams")
	refused(bob.ctx, w.t, bob, "shop", "volume", "list")
	admin.does("group", "add", "devs", "bob", "--org", "teams")
	bob.does("volume", "delete", "data")
}

// rivals checks that mallory, the administrator of another org, has no access to ada's project, can invite ada to a
// role in a project of the other org, and that the role has an effect only after ada has accepted it.
func (w *world) rivals(admin *somebody, password string) {
	mallory := &somebody{w: w, ctx: admin.ctx, home: w.t.TempDir()}
	ada := &somebody{w: w, ctx: admin.ctx, home: w.t.TempDir()}
	admin.does("org", "create", "rival")
	admin.does("project", "create", "lab", "--org", "rival")
	admin.does("user", "create", "mallory", "--org", "rival")
	admin.does("user", "password", "mallory", "--password-file", password)
	admin.does("binding", "add", "--user", "mallory", "--role", "org:admin", "--org", "rival")
	login := []string{"login", "--endpoint", everyMember, "--password-file", password}
	ada.does(append(login, "--user", "ada")...)
	require.Regexp(w.t, `Acts in: +acme/web, unless`, ada.does("whoami"))

	mallory.does(append(login, "--user", "mallory")...)
	mallory.cannot("mallory has no role in project web", append(login, "--user", "mallory", "--project", "web", "--context", "x")...)
	mallory.cannot("mallory has no role in project nix", append(login, "--user", "mallory", "--project", "nix", "--context", "x")...)
	require.NotContains(w.t, mallory.does("context", "list"), "x ")
	mallory.cannot("no project web", "quota", "show", "--project", "web")
	mallory.does("quota", "show", "--project", "lab")
	mallory.does("vm", "list", "--project", "lab")
	mallory.does("project", "create", "more", "--org", "rival")
	mallory.does("vm", "list", "--org", "rival", "--project", "more")
	mallory.does("project", "delete", "more")
	for _, user := range []string{"ada", "nobody"} {
		require.Contains(w.t, mallory.does("binding", "add", "--user", user, "--role", "project:viewer", "--project", "lab"), "is invited to project:viewer of rival/lab")
	}

	require.Regexp(w.t, `memory +0 +4 GiB`, ada.does("quota", "show"))
	ada.cannot("no project lab", "quota", "show", "--project", "lab")
	require.Regexp(w.t, `rival/lab +project:viewer +mallory`, ada.does("invitation", "list"))
	ada.does("invitation", "accept", "rival/lab")
	ada.does("quota", "show", "--project", "lab")
	require.Regexp(w.t, `memory +0 +4 GiB`, ada.does("quota", "show"))
	require.Regexp(w.t, `ada +project:viewer +rival +lab +ACTIVE`, mallory.does("binding", "list", "--org", "rival"))
	ada.does("binding", "remove", "--user", "ada", "--role", "project:viewer", "--project", "lab")
	ada.cannot("no project lab", "quota", "show", "--project", "lab")
}

// refused waits until trivet fails with the exit code 3 or 5 and an error that contains the text want. It runs trivet
// repeatedly, because a member may use cached data for one second.
func refused(ctx context.Context, t *testing.T, p *somebody, want string, args ...string) {
	t.Helper()
	require.NoError(t, lab.Until(ctx, "the command is refused", func(ctx context.Context) error {
		_, errs, code := p.w.trivet(ctx, p.home, args...)
		if code != 3 && code != 5 || !strings.Contains(errs, want) {
			return fmt.Errorf("trivet %s ended with %d: %s", strings.Join(args, " "), code, errs)
		}
		return nil
	}))
}

// savedToken returns the first token in the file of saved logins.
func savedToken(t *testing.T, p *somebody) string {
	text, err := os.ReadFile(filepath.Join(p.home, "trivet", "config.yaml"))
	require.NoError(t, err)
	found := regexp.MustCompile(`token: (\S+)`).FindStringSubmatch(string(text))
	require.NotNil(t, found)
	return found[1]
}
