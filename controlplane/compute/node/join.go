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

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

const (
	// tokenTTL and maxTokenTTL are the default and maximum lifetimes of join tokens.
	tokenTTL    = time.Hour
	maxTokenTTL = 30 * 24 * time.Hour
	// CertificateLife is the lifetime of a host's certificate. An agent renews its certificate at half of it.
	CertificateLife = 24 * time.Hour
	// RenewGrace is how long after its certificate has expired a host can still renew it without a new token.
	RenewGrace = 7 * 24 * time.Hour
)

// joinToken is the record of a join token, at join-token/<id>. A host joins the cluster with a token.
type joinToken struct {
	Secret  [32]byte // SHA-256 of the secret
	Name    string
	Expires cloud.Time
	// Key is the SHA-256 of the public key that joined with the token, and Node the resulting host. Both are empty
	// until a host has used the token.
	Key  []byte
	Node cloud.NodeID
}

var joinTokens = store.NewTable[joinToken]("join-token")

// hostKeys is the table that maps a host's public key to the host's ID, at host-key/<SHA-256 of the public key, hex>.
// With it, a host keeps its ID when it joins again with a new token, for example after its certificate expired or after
// the cluster was restored from a backup.
var hostKeys = store.NewTable[cloud.NodeID]("host-key")

// storeKey stores that a key belongs to the host with this ID. It changes nothing if the key already belongs to a host
// with a record.
func storeKey(tx *store.Tx, key []byte, id cloud.NodeID) error {
	if holder, err := keyOwner(tx, key); err != nil || holder != "" {
		return err
	}
	hostKeys.Put(tx, &id, keyText(key))
	return nil
}

// keyOwner returns the ID of the host to which a key belongs. It returns "" if the key is unknown or its host has no
// record any more.
func keyOwner(tx *store.Tx, key []byte) (cloud.NodeID, error) {
	id, err := hostKeys.Get(tx, keyText(key))
	if err != nil || id == nil {
		return "", err
	}
	if known, err := Nodes.Has(tx, string(*id)); err != nil || !known {
		return "", err
	}
	return *id, nil
}

type tokenRequest struct {
	Name string
	TTL  time.Duration
}

type tokenResponse struct {
	Token   string
	Expires cloud.Time
}

var newTokenCommand = leader.NewCommand("node.new-token", leader.Repeatable, (*Service).newTokenOnLeader)

// newTokenOnLeader stores a new join token and returns its text, "<id>.<secret>.<pin>". The pin is the SHA-256 of the
// certificate authority's public key, by which the agent verifies the server. Only the hash of the secret is stored.
func (s *Service) newTokenOnLeader(ctx context.Context, q tokenRequest) (made tokenResponse, err error) {
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

type joinRequest struct {
	ID, Secret, Name string
	Key              []byte
}

func errBadToken() error {
	return fault.New(fault.Unauthenticated, "the join token is unknown, expired or used by another host: make a new one with `trivet host token`")
}

var admitCommand = leader.NewCommand("node.admit", leader.Repeatable, (*Service).admitOnLeader)

// admitOnLeader marks a join token as used by the key q.Key and returns the host's ID. It creates a host record for a
// new key. A key that already belongs to a host gets that host's ID again, because only the machine that runs the
// host's VMs has the key.
func (s *Service) admitOnLeader(ctx context.Context, q joinRequest) (id cloud.NodeID, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		t, err := joinTokens.Get(tx, q.ID)
		if err != nil {
			return err
		}
		given := sha256.Sum256([]byte(q.Secret))
		if t == nil || subtle.ConstantTimeCompare(given[:], t.Secret[:]) != 1 || tx.Now() >= t.Expires {
			return errBadToken()
		}
		if t.Name != "" && t.Name != q.Name {
			return fault.New(fault.PermissionDenied, "the join token is for the host %s", t.Name)
		}
		if err := checkBan(tx, q.Key); err != nil {
			return err
		}
		if t.Node != "" {
			if subtle.ConstantTimeCompare(t.Key, q.Key) != 1 {
				return errBadToken()
			}
			if known, err := Nodes.Has(tx, string(t.Node)); err != nil || !known {
				return cmp.Or(err, errBadToken()) // the host's record was deleted meanwhile
			}
			id = t.Node
			return nil
		}
		if id, err = keyOwner(tx, q.Key); err != nil {
			return err
		}
		if id != "" && s.connected(id) {
			return fault.New(fault.Unavailable, "node %s is connected and has the same key: if this host is a copy of that one, "+
				"remove the identity that was copied with it from the agent's data directory", id).MayRetry()
		}
		if id != "" {
			t.Key, t.Node = q.Key, id
			joinTokens.Put(tx, t, q.ID)
			return joinAgain(tx, id)
		}
		if err := s.checkName(tx, q.Name); err != nil {
			return err
		}
		made, err := uuid.NewV7()
		if err != nil {
			return err
		}
		id = cloud.NodeID(made.String())
		t.Key, t.Node = q.Key, id
		joinTokens.Put(tx, t, q.ID)
		if err := storeKey(tx, q.Key, id); err != nil {
			return err
		}
		Nodes.Put(tx, &cloud.Node{ID: id, Name: q.Name, Declared: cloud.NodeNotReady, CreatedAt: tx.Now(), UpdatedAt: tx.Now()}, string(id))
		return nil
	})
	return id, err
}

// checkName returns AlreadyExists if a connected host has the name of a new host. Commands and node selectors choose
// hosts by their names. Without the check, a configuration that was copied from another host would make the name
// ambiguous. The name of a host that is not connected is accepted: a new machine that replaces a lost host usually has
// its name, and the record of the lost host stays until an operator evicts it.
func (s *Service) checkName(tx *store.Tx, name string) error {
	all, _, err := Nodes.List(tx.Unguarded(), 0)
	if err != nil {
		return err
	}
	for _, r := range all {
		if r.Value.Name == name && s.connected(r.Value.ID) {
			return fault.New(fault.AlreadyExists, "node %s is connected and has the name %s: set another name in the configuration of this host's agent, "+
				"or stop the agent of that host if this one replaces it", r.Value.ID, name).MayRetry()
		}
	}
	return nil
}

// joinAgain records that a host that may have been evicted has joined the cluster again under the same ID.
func joinAgain(tx *store.Tx, id cloud.NodeID) error {
	e, err := evictions.Get(tx, string(id))
	if err == nil && e != nil {
		evictions.Put(tx, &eviction{At: e.At, Joined: tx.Now()}, string(id))
	}
	return err
}

// Expire deletes expired join tokens, at most 1000 per call. Package leader calls it periodically on the leader.
func (s *Service) Expire(ctx context.Context) error {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		all, _, err := joinTokens.List(tx.Unguarded(), 0)
		if err != nil {
			return err
		}
		left := 1000 // a later call deletes the rest
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

// checkRequest parses a certificate signing request (PKCS #10, DER), verifies its signature and returns the SHA-256 of
// its public key. An invalid request gives InvalidArgument.
func checkRequest(der []byte) (*x509.CertificateRequest, []byte, error) {
	csr, key, err := mtls.ParseRequest(der)
	if err != nil {
		return nil, nil, fault.Invalid("csr", "%v", err)
	}
	return csr, key, nil
}
