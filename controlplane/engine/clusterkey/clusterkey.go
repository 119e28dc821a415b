// Package clusterkey is the one secret that the members of a control plane share, and what follows from it: the
// authority that signs certificates, the cluster's id, the key that seals secrets at rest, the key of page tokens.
//
// Agents and clients never hold it. Whoever does is a member.
//
// A cluster that was made of a backup, or of what is left of another, must not be taken for the old one: not by old
// members, not by hosts. So the file can hold a generation beside the secret. What the secret seals opens under each
// generation; the cluster's id and the authority, and with them every certificate and token, are of one only.
package clusterkey

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/shared/mtls"
)

// Size of the key in bytes.
const Size = 32

// Key is the shared secret.
type Key struct {
	secret     []byte
	generation uint64 // 0 is the first
}

// Generate draws a new key.
func Generate() *Key {
	secret := make([]byte, Size)
	rand.Read(secret)
	return &Key{secret: secret}
}

// Renewed is the key of another cluster, which can read what this one has sealed.
func (k *Key) Renewed() *Key {
	var b [8]byte
	rand.Read(b[:])
	return &Key{secret: k.secret, generation: max(binary.BigEndian.Uint64(b[:]), 1)}
}

// Encode is the file form: base64, after the first generation a space and its number in hex, and a newline.
func (k *Key) Encode() string {
	text := base64.StdEncoding.EncodeToString(k.secret)
	if k.generation != 0 {
		text += " " + strconv.FormatUint(k.generation, 16)
	}
	return text + "\n"
}

// Parse reads the file form.
func Parse(text string) (*Key, error) {
	text, number, renewed := strings.Cut(strings.TrimSpace(text), " ")
	secret, err := base64.StdEncoding.DecodeString(text)
	var generation uint64
	if err == nil && renewed {
		generation, err = strconv.ParseUint(number, 16, 64)
	}
	if err != nil || len(secret) != Size {
		return nil, fmt.Errorf("not a cluster key: want %d bytes in base64, as `trivet-controlplane keygen` prints", Size)
	}
	return &Key{secret: secret, generation: generation}, nil
}

// Load reads a key from a file that only its owner may read.
func Load(path string) (*Key, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("open cluster key: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("cluster key %s can be read by others (mode %04o): chmod 600 it", path, info.Mode().Perm())
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read cluster key: %w", err)
	}
	k, err := Parse(string(text))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return k, nil
}

// LoadOrMake is Load that makes the key on first use, for a lone member.
func LoadOrMake(path string) (*Key, error) {
	k, err := Load(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return k, err
	}
	k = Generate()
	if err := os.WriteFile(path, []byte(k.Encode()), 0o600); err != nil {
		return nil, fmt.Errorf("write cluster key: %w", err)
	}
	return k, nil
}

// Derive gives 32 bytes for one purpose (HKDF-SHA256, RFC 5869).
func (k *Key) Derive(purpose string) []byte {
	out, err := hkdf.Key(sha256.New, k.secret, nil, "trivet/"+purpose, 32)
	if err != nil {
		panic(err) // only for lengths that HKDF cannot give
	}
	return out
}

// ofGeneration is a purpose of which each generation has its own.
func (k *Key) ofGeneration(purpose string) string {
	if k.generation == 0 {
		return purpose
	}
	return purpose + "/" + strconv.FormatUint(k.generation, 16)
}

// ClusterID is 1 to 2^53−1, so that every JSON reader keeps it exactly.
func (k *Key) ClusterID() uint64 {
	id := binary.BigEndian.Uint64(k.Derive(k.ofGeneration("cluster-id"))) & (1<<53 - 1)
	return max(id, 1)
}

// Cluster is the cluster's name in certificates.
func (k *Key) Cluster() string { return strconv.FormatUint(k.ClusterID(), 10) }

// Authority is the cluster's.
func (k *Key) Authority() (*mtls.Authority, error) {
	return mtls.NewAuthority(k.Cluster(), k.Derive(k.ofGeneration("authority")))
}

// Seal encrypts a secret for rest, bound to the name it is kept under (AES-256-GCM).
func (k *Key) Seal(name string, plain []byte) []byte {
	aead := k.aead()
	nonce := make([]byte, aead.NonceSize())
	rand.Read(nonce)
	return aead.Seal(nonce, nonce, plain, []byte(name))
}

// Open undoes Seal.
func (k *Key) Open(name string, sealed []byte) ([]byte, error) {
	aead := k.aead()
	if len(sealed) < aead.NonceSize() {
		return nil, fmt.Errorf("open secret %s: too short", name)
	}
	plain, err := aead.Open(nil, sealed[:aead.NonceSize()], sealed[aead.NonceSize():], []byte(name))
	if err != nil {
		return nil, fmt.Errorf("open secret %s: sealed under another cluster key, or changed", name)
	}
	return plain, nil
}

func (k *Key) aead() cipher.AEAD {
	block, err := aes.NewCipher(k.Derive("secrets"))
	if err != nil {
		panic(err) // only for key sizes that AES does not have
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic(err)
	}
	return aead
}
