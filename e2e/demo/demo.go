// Package demo makes what a cloud for a first look has besides members and a host: the user demo, and saved logins for
// the command line. `make up` and the program trivet-dev use it.
package demo

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"strings"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// User is the ID of the user, who has the role project:member in the project default of the org default.
const User = "demo"

// Ports lists the addresses of the services of a member on 127.0.0.1, one per line.
const Ports = `  gRPC            127.0.0.1:50051             all services, with reflection; etcd's API
  key-value store http://127.0.0.1:8081
  identity        http://127.0.0.1:8083       tokens, OpenID discovery
  VMs             http://127.0.0.1:8084       images, volumes, hosts; /metrics
  credit          http://127.0.0.1:8086       gRPC 50057
  networks        http://127.0.0.1:8087       gRPC 9090`

// tokenLife is the lifetime of the user's token in seconds.
const tokenLife = 24 * 3600

// PasswordFile and TokenFile return the paths of the files with the user's password and token. AdminFile returns that
// of the file with the administrator's token.
func PasswordFile(dir lab.Dir) string { return dir.Path("demo.password") }
func TokenFile(dir lab.Dir) string    { return dir.Path("tenant.token") }
func AdminFile(dir lab.Dir) string    { return dir.Path("admin.token") }

// KeepAdmin waits until a member has written the administrator's token, copies the token to AdminFile, and returns it.
func KeepAdmin(ctx context.Context, t *lab.Trio) (token string, err error) {
	err = lab.Until(ctx, "there is an admin token", func(context.Context) error {
		token, err = t.AdminToken()
		return err
	})
	if err != nil {
		return "", err
	}
	return token, os.WriteFile(AdminFile(t.Dir), []byte(token+"\n"), 0o600)
}

// EnsureUser creates the user unless it exists, requests a token with the user's password from the member, and returns
// the token. It writes the password and the token to PasswordFile and TokenFile. made is true if it has created the
// user. The clients g belong to an administrator.
func EnsureUser(ctx context.Context, dir lab.Dir, g *lab.GRPC, member string) (token string, made bool, err error) {
	password, err := os.ReadFile(PasswordFile(dir))
	made = errors.Is(err, os.ErrNotExist)
	if made {
		err = os.WriteFile(PasswordFile(dir), nil, 0o600)
	}
	if err != nil {
		return "", false, err
	}
	secret := strings.TrimSpace(string(password))
	if made = made || !exists(ctx, g); made {
		if secret == "" {
			secret = rand.Text()
		}
		binding := &identityv1.Binding{Role: "project:member", OrgId: "default", ProjectId: "default"}
		if err := g.EnsureUser(ctx, User, secret, binding); err != nil {
			return "", false, err
		}
		if err := os.WriteFile(PasswordFile(dir), []byte(secret+"\n"), 0o600); err != nil {
			return "", false, err
		}
	}
	rest := &lab.REST{Host: member}
	token, err = rest.IssueToken(ctx, User, secret, map[string]any{"ttl_seconds": tokenLife})
	if err != nil {
		return "", false, err
	}
	return token, made, os.WriteFile(TokenFile(dir), []byte(token+"\n"), 0o600)
}

// exists reports whether the user has been created completely.
func exists(ctx context.Context, g *lab.GRPC) bool {
	u, err := g.Identity.GetUser(ctx, &identityv1.GetUserRequest{Id: User})
	return err == nil && u.GetRegistered() && len(u.GetBindings()) > 0
}
