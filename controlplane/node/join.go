package node

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

const (
	// tokenTTL and maxTokenTTL are lifetimes of join tokens.
	tokenTTL    = time.Hour
	maxTokenTTL = 30 * 24 * time.Hour
	// CertificateLife is a host's; agents renew at half of it.
	CertificateLife = 24 * time.Hour
	// RenewGrace lets a host that was off for long renew without a new token.
	RenewGrace = 7 * 24 * time.Hour
)

// joinToken is a token at rest: join-token/<id>.
type joinToken struct {
	Secret  [32]byte // SHA-256 of it
	Name    string
	Expires cloud.Time
	// Key is the hash of the public key that used the token, Node the host that came of it. Both are empty before.
	Key  []byte
	Node cloud.NodeID
}

var joinTokens = store.NewTable[joinToken]("join-token")

type tokenAsk struct {
	Name string
	TTL  time.Duration
}

type tokenMade struct {
	Token   string
	Expires cloud.Time
}

// doNewToken makes a token: its id, its secret, and the pin of the authority that the agent will check.
func (s *Service) doNewToken(ctx context.Context, q tokenAsk) (made tokenMade, err error) {
	secret := make([]byte, 24)
	rand.Read(secret)
	id := hex.EncodeToString(secret[:8])
	text := base64.RawURLEncoding.EncodeToString(secret[8:])
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		made.Expires = tx.Now() + q.TTL.Milliseconds()
		joinTokens.Put(tx, &joinToken{Secret: sha256.Sum256([]byte(text)), Name: q.Name, Expires: made.Expires}, id)
		return nil
	})
	made.Token = strings.Join([]string{id, text, mtls.Pin(s.opts.Authority.Certificate())}, ".")
	return made, err
}

type joinAsk struct {
	ID, Secret, Name string
	Key              []byte
}

func errBadJoin() error {
	return fault.New(fault.Unauthenticated, "the join token is unknown, expired or used by another host: make a new one with `trivet node token`")
}

// doAdmit uses a token for a key and names the host. The same key gets the same host again while the token lives.
func (s *Service) doAdmit(ctx context.Context, q joinAsk) (id cloud.NodeID, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		t, err := joinTokens.Get(tx, q.ID)
		if err != nil {
			return err
		}
		given := sha256.Sum256([]byte(q.Secret))
		if t == nil || subtle.ConstantTimeCompare(given[:], t.Secret[:]) != 1 || tx.Now() >= t.Expires {
			return errBadJoin()
		}
		if t.Name != "" && t.Name != q.Name {
			return fault.New(fault.PermissionDenied, "the join token is for the host %s", t.Name)
		}
		if t.Node != "" {
			if subtle.ConstantTimeCompare(t.Key, q.Key) != 1 {
				return errBadJoin()
			}
			if known, err := Nodes.Has(tx, string(t.Node)); err != nil || !known {
				return cmp.Or(err, errBadJoin()) // the host was removed since
			}
			id = t.Node
			return nil
		}
		made, err := uuid.NewV7()
		if err != nil {
			return err
		}
		id = cloud.NodeID(made.String())
		t.Key, t.Node = q.Key, id
		joinTokens.Put(tx, t, q.ID)
		Nodes.Put(tx, &cloud.Node{ID: id, Name: q.Name, Declared: cloud.NodeNotReady, CreatedAt: tx.Now(), UpdatedAt: tx.Now()}, string(id))
		return nil
	})
	return id, err
}

// Expire removes join tokens that are over. It is a leader's task.
func (s *Service) Expire(ctx context.Context) error {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		all, _, err := joinTokens.List(tx.Unguarded(), 0)
		if err != nil {
			return err
		}
		left := 1000 // others go the next time
		for _, r := range all {
			if left > 0 && tx.Now() >= r.Value.Expires {
				joinTokens.Delete(tx, r.Path...)
				left--
			}
		}
		return nil
	})
	return err
}

// maxRequest is the limit of a certificate request in bytes.
const maxRequest = 8 << 10

// checkRequest reads a certificate request and proves that its sender holds the key, which is of Ed25519 or ECDSA: what
// anybody may send is cheap to check. Its subject is ignored.
func checkRequest(der []byte) (*x509.CertificateRequest, []byte, error) {
	if len(der) > maxRequest {
		return nil, nil, fault.Invalid("csr", "at most %d bytes", maxRequest)
	}
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, nil, fault.Invalid("csr", "is not a certificate request").Because(err)
	}
	if csr.PublicKeyAlgorithm != x509.Ed25519 && csr.PublicKeyAlgorithm != x509.ECDSA {
		return nil, nil, fault.Invalid("csr", "the key must be of Ed25519 or ECDSA")
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, nil, fault.Invalid("csr", "is not signed by its own key").Because(err)
	}
	key, err := x509.MarshalPKIXPublicKey(csr.PublicKey)
	if err != nil {
		return nil, nil, fault.Invalid("csr", "has a key of an unknown kind").Because(err)
	}
	sum := sha256.Sum256(key)
	return csr, sum[:], nil
}
