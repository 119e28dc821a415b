package demo

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

// Contexts are the saved logins of a cloud in the file of `trivet login`, for plain commands such as `trivet vm list`.
// They have names that no login gets by itself, so that they replace no login of the user.
type Contexts struct {
	// Path is the path of the file.
	Path string
	// Members are the addresses of the members. A context with other endpoints belongs to another cloud.
	Members []string
	// Tokens maps the name of each context to its token.
	Tokens map[string]string
	// First is the name of the context that becomes the current one if the user is logged in to no other.
	First string
}

// endpoints returns the host:port of the gRPC port of each member.
func (c *Contexts) endpoints() (all []string) {
	for _, m := range c.Members {
		all = append(all, net.JoinHostPort(m, account.DefaultPort))
	}
	return all
}

// Save writes the contexts, and makes First the current context unless the user is logged in to another current one. It
// reports whether First is the current context. It returns an error, and writes nothing, if the file has a context of
// another cloud with one of the names.
func (c *Contexts) Save(ctx context.Context) (current bool, err error) {
	logins := map[string]*account.Login{}
	for name, token := range c.Tokens {
		if logins[name], err = c.login(ctx, token); err != nil {
			return false, err
		}
	}
	err = account.Update(ctx, c.Path, func(b *account.Book) error {
		for name := range logins {
			if old := b.Contexts[name]; old != nil && !c.owns(old) {
				return fmt.Errorf("the context %s in %s belongs to another cloud: rename it with `trivet context rename`", name, c.Path)
			}
		}
		maps.Copy(b.Contexts, logins)
		current = c.choose(b)
		return nil
	})
	return current, err
}

// choose makes First the current context unless the user is logged in to another current one, and reports whether First
// is the current context.
func (c *Contexts) choose(b *account.Book) bool {
	if l := b.Contexts[b.Current]; l == nil || l.Token == "" {
		b.Current = c.First
	}
	return b.Current == c.First
}

// owns reports whether a login has the endpoints of this cloud.
func (c *Contexts) owns(l *account.Login) bool { return slices.Equal(l.Endpoints, c.endpoints()) }

// login returns the login of a token, with the user and the expiry that the first member returns.
func (c *Contexts) login(ctx context.Context, token string) (*account.Login, error) {
	g, err := lab.Dial(c.Members[0], token)
	if err != nil {
		return nil, err
	}
	defer g.Close()
	me, err := g.Identity.WhoAmI(ctx, &identityv1.WhoAmIRequest{})
	if err != nil {
		return nil, err
	}
	return &account.Login{
		Endpoints: c.endpoints(), User: me.GetPrincipalId(), Token: account.Secret(token), ExpiresAt: time.UnixMilli(me.GetExpiresAt()).UTC(),
	}, nil
}

// Remove deletes the contexts of this cloud, if they exist.
func (c *Contexts) Remove(ctx context.Context) error {
	b, err := account.Load(c.Path)
	if err != nil {
		return err
	}
	owned := func(name string) bool { return b.Contexts[name] != nil && c.owns(b.Contexts[name]) }
	if !slices.ContainsFunc(slices.Collect(maps.Keys(c.Tokens)), owned) {
		return nil // without a change, the file is not created
	}
	return account.Update(ctx, c.Path, func(now *account.Book) error {
		b = now
		for name := range c.Tokens {
			if owned(name) {
				delete(b.Contexts, name)
			}
		}
		if b.Contexts[b.Current] == nil {
			b.Current = ""
		}
		return nil
	})
}
