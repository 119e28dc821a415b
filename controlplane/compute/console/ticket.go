package console

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"fmt"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// TicketLife is how long a ticket can be used.
	TicketLife = time.Minute
	// ExpireEvery is the time between two runs of Expire.
	ExpireEvery = time.Minute
	// maxTickets is the maximum number of tickets of a project that were not used and are still valid.
	maxTickets = 100
	// maxToken is the maximum length of a token that a ticket can store, in bytes.
	maxToken = 16 << 10
	// maxTicket is the maximum length of the text of a ticket, in bytes.
	maxTicket = 512
)

// ticket is the record of a ticket: console-ticket/<project>/<id>. It is deleted when the ticket is used.
type ticket struct {
	Org     cloud.OrgID
	Secret  [32]byte // SHA-256 of the secret
	Expires cloud.Time
	Session Session
	// Token is the token of the user, encrypted with the secret (see seal).
	Token []byte
}

var tickets = store.NewTable[ticket]("console-ticket")

// Ticket opens one console, as text for a URL.
type Ticket struct {
	Text    string
	Expires cloud.Time
}

// CreateTicket returns a ticket that opens the console q of the tenant t with the rights of the given token. It returns
// NotFound if t has no such VM, and ResourceExhausted if the project has too many tickets.
func (s *Service) CreateTicket(ctx context.Context, t cloud.Tenant, q Session, token string) (Ticket, error) {
	if err := q.check(); err != nil {
		return Ticket{}, err
	}
	if token == "" || len(token) > maxToken {
		return Ticket{}, fault.New(fault.FailedPrecondition, "authenticate with a bearer token of at most %d bytes to create a console ticket", maxToken)
	}
	if _, err := s.opts.VMs.Get(ctx, t, q.VM); err != nil {
		return Ticket{}, err
	}
	secret := rand.Text()
	sealed, err := seal(secret, token)
	if err != nil {
		return Ticket{}, err
	}
	id := rand.Text()
	expires, err := createTicketCommand.Call(ctx, s.opts.Commands, newTicket{ID: id, Tenant: t, Secret: sha256.Sum256([]byte(secret)), Session: q, Token: sealed})
	if err != nil {
		return Ticket{}, err
	}
	text := strings.Join([]string{base64.RawURLEncoding.EncodeToString([]byte(t.Project)), id, secret}, ".")
	return Ticket{Text: text, Expires: expires}, nil
}

// newTicket holds the arguments of createTicketCommand.
type newTicket struct {
	ID      string
	Tenant  cloud.Tenant
	Secret  [32]byte
	Session Session
	Token   []byte
}

var createTicketCommand = leader.NewCommand("console.create-ticket", leader.Repeatable, (*Service).createTicketOnLeader)

// createTicketOnLeader stores a ticket, and returns when it expires.
func (s *Service) createTicketOnLeader(ctx context.Context, q newTicket) (expires cloud.Time, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		all, _, err := tickets.List(tx, 0, string(q.Tenant.Project))
		if err != nil {
			return err
		}
		valid := 0
		for _, one := range all {
			if tx.Now() >= one.Value.Expires {
				tickets.Delete(tx, one.Path...)
			} else if one.Path[1] != q.ID { // a repeated command replaces its own ticket
				valid++
			}
		}
		if valid >= maxTickets {
			return fault.New(fault.ResourceExhausted, "project %s has %d unused console tickets, which is the limit: wait until one expires", q.Tenant, valid).
				WithReason("TOO_MANY_TICKETS").With("limit", maxTickets).MayRetry()
		}
		expires = tx.Now() + TicketLife.Milliseconds()
		tickets.Put(tx, &ticket{Org: q.Tenant.Org, Secret: q.Secret, Expires: expires, Session: q.Session, Token: q.Token}, string(q.Tenant.Project), q.ID)
		return nil
	})
	return expires, err
}

// redeemed is the session that a ticket authorizes, and the creator's encrypted token.
type redeemed struct {
	Tenant  cloud.Tenant
	Session Session
	Token   []byte
}

// errBadTicket returns the error for a ticket that is unknown, used or expired. The error does not say which of the
// three, so that callers cannot probe for tickets.
func errBadTicket() error {
	return fault.New(fault.Unauthenticated, "the ticket is unknown, expired or used already: create another one")
}

// lookup returns the tenant and the console session of a ticket, and the token of the user who created the ticket. It
// does not redeem the ticket. It returns Unauthenticated if the ticket is not valid.
func (s *Service) lookup(ctx context.Context, text string) (redeemed, string, error) {
	return s.callForTicket(ctx, text, lookupTicketCommand)
}

// redeem marks a ticket as used, and returns the same values as lookup. Only one of several calls with the same ticket
// succeeds. The others return Unauthenticated.
func (s *Service) redeem(ctx context.Context, text string) (redeemed, string, error) {
	return s.callForTicket(ctx, text, redeemTicketCommand)
}

// callForTicket parses the text of a ticket, calls command on the leader with the ID and the secret of the ticket, and
// decrypts the token in the result.
func (s *Service) callForTicket(ctx context.Context, text string, command *leader.Command[*Service, redemption, redeemed]) (redeemed, string, error) {
	parts := strings.Split(text, ".")
	if len(parts) != 3 || len(text) > maxTicket {
		return redeemed{}, "", errBadTicket()
	}
	project, err := base64.RawURLEncoding.DecodeString(parts[0])
	if err != nil || len(project) == 0 || parts[1] == "" {
		return redeemed{}, "", errBadTicket()
	}
	out, err := command.Call(ctx, s.opts.Commands, redemption{Project: cloud.ProjectID(project), ID: parts[1], Secret: sha256.Sum256([]byte(parts[2]))})
	if err != nil {
		return redeemed{}, "", err
	}
	token, err := open(parts[2], out.Token)
	return out, token, err
}

// redemption holds the arguments of redeemTicketCommand.
type redemption struct {
	Project cloud.ProjectID
	ID      string
	Secret  [32]byte
}

// read returns the access that the ticket of q grants. It returns Unauthenticated if the ticket is not valid.
func (q redemption) read(r store.Reader, now cloud.Time) (redeemed, error) {
	t, err := tickets.Get(r, string(q.Project), q.ID)
	if err != nil {
		return redeemed{}, err
	}
	if t == nil || subtle.ConstantTimeCompare(q.Secret[:], t.Secret[:]) != 1 || now >= t.Expires {
		return redeemed{}, errBadTicket()
	}
	return redeemed{Tenant: cloud.Tenant{Org: t.Org, Project: q.Project}, Session: t.Session, Token: t.Token}, nil
}

var lookupTicketCommand = leader.NewCommand("console.lookup-ticket", leader.Repeatable, (*Service).lookupTicketOnLeader)

func (s *Service) lookupTicketOnLeader(ctx context.Context, q redemption) (out redeemed, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		out, err = q.read(v, s.opts.Store.Now())
		return err
	})
	return out, err
}

var redeemTicketCommand = leader.NewCommand("console.redeem-ticket", leader.Once, (*Service).redeemTicketOnLeader)

// redeemTicketOnLeader deletes the record of a ticket, and returns what the ticket permits.
func (s *Service) redeemTicketOnLeader(ctx context.Context, q redemption) (out redeemed, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		if out, err = q.read(tx, tx.Now()); err != nil {
			return err
		}
		if !mutant.On(mutant.ReuseConsoleTicket) {
			tickets.Delete(tx, string(q.Project), q.ID)
		}
		return nil
	})
	return out, err
}

// Expire removes expired tickets. Only the leader runs it.
func (s *Service) Expire(ctx context.Context) error {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		all, _, err := tickets.List(tx.Unguarded(), 0)
		if err != nil {
			return err
		}
		for _, one := range all {
			if tx.Now() >= one.Value.Expires {
				tickets.Delete(tx, one.Path...)
			}
		}
		return nil
	})
	return err
}

// aead returns the cipher for the token of a ticket. Each secret is used for one token only.
func aead(secret string) (cipher.AEAD, error) {
	key := sha256.Sum256([]byte("trivet console ticket\x00" + secret))
	block, err := aes.NewCipher(key[:])
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

// seal encrypts a token with the secret of a ticket.
func seal(secret, token string) ([]byte, error) {
	c, err := aead(secret)
	if err != nil {
		return nil, fmt.Errorf("encrypt token of a ticket: %w", err)
	}
	return c.Seal(nil, nil, []byte(token), nil), nil
}

// open is the inverse of seal.
func open(secret string, sealed []byte) (string, error) {
	c, err := aead(secret)
	if err != nil {
		return "", fmt.Errorf("decrypt token of a ticket: %w", err)
	}
	token, err := c.Open(nil, nil, sealed, nil)
	if err != nil {
		return "", fmt.Errorf("decrypt token of a ticket: %w", err)
	}
	return string(token), nil
}
