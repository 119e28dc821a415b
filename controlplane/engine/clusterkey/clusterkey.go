// Package clusterkey holds the cluster key: the secret that all members of a control plane share. From it the package
// derives the certificate authority, the cluster's ID, the key that encrypts secrets at rest, and other keys, such as
// the one for page tokens.
//
// Agents and clients never have the cluster key. A process that has it can act as a member.
//
// Besides the secret, the key file can contain a generation. A cluster that is restored from a backup or from a
// surviving member gets a new generation, so that members and hosts of the old cluster cannot mistake it for the old
// one. The cluster's ID and the certificate authority, and so all certificates and tokens, differ between generations.
// The keys that encrypt data do not: data that was encrypted under one generation can be decrypted under all of them.
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

	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// Size is the size of the secret in bytes.
const Size = 32

// Key is the secret that the members of a control plane share, together with its generation.
type Key struct {
	secret     []byte
	generation uint64 // 0 for a new key, random after Renewed
}

// Generate returns a new random key.
func Generate() *Key {
	secret := make([]byte, Size)
	rand.Read(secret)
	return &Key{secret: secret}
}

// Renewed returns the key for a restored cluster. It has the same secret and a new random generation.
func (k *Key) Renewed() *Key {
	var b [8]byte
	rand.Read(b[:])
	return &Key{secret: k.secret, generation: max(binary.BigEndian.Uint64(b[:]), 1)}
}

// Encode returns k in the format of key files: the secret in base64 and a newline. If the generation is not 0, a space
// and the generation in hex precede the newline.
func (k *Key) Encode() string {
	text := base64.StdEncoding.EncodeToString(k.secret)
	if k.generation != 0 {
		text += " " + strconv.FormatUint(k.generation, 16)
	}
	return text + "\n"
}

// Parse decodes a key in the format that Encode returns.
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

// Load reads a key from the file path. It returns an error if the group or others have any permission on the file.
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

// LoadOrMake loads the key from the file path. If the file does not exist, it generates a key and writes it to the
// file. Only a cluster with a single member may call it, because several members would generate different keys.
func LoadOrMake(path string) (*Key, error) {
	k, err := Load(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return k, err
	}
	k = Generate()
	if err := atomicfile.WriteFile(path, []byte(k.Encode()), 0o600); err != nil {
		return nil, fmt.Errorf("write cluster key: %w", err)
	}
	return k, nil
}

// Derive derives from the secret a key of 32 bytes for the given purpose (HKDF-SHA256, RFC 5869). The result is the
// same in all generations.
func (k *Key) Derive(purpose string) []byte {
	out, err := hkdf.Key(sha256.New, k.secret, nil, "trivet/"+purpose, 32)
	if err != nil {
		panic(err) // only for lengths that HKDF does not support
	}
	return out
}

// ofGeneration returns the argument of Derive for a key that must differ between generations: the purpose and the
// generation.
func (k *Key) ofGeneration(purpose string) string {
	if k.generation == 0 {
		return purpose
	}
	return purpose + "/" + strconv.FormatUint(k.generation, 16)
}

// DeriveForGeneration is Derive for a key that differs between the generations.
func (k *Key) DeriveForGeneration(purpose string) []byte { return k.Derive(k.ofGeneration(purpose)) }

// ClusterID returns the cluster's ID, a number from 1 to 2^53−1. Every JSON parser represents such a number exactly.
func (k *Key) ClusterID() uint64 {
	id := binary.BigEndian.Uint64(k.Derive(k.ofGeneration("cluster-id"))) & (1<<53 - 1)
	return max(id, 1)
}

// Cluster returns the cluster's name as it appears in certificates: the cluster's ID in decimal.
func (k *Key) Cluster() string { return strconv.FormatUint(k.ClusterID(), 10) }

// Authority returns the cluster's certificate authority, whose key is derived from the secret and the generation.
func (k *Key) Authority() (*mtls.Authority, error) {
	return mtls.NewAuthority(k.Cluster(), k.Derive(k.ofGeneration("authority")))
}

// Seal encrypts plain, a secret that is to be stored, with AES-256-GCM. Open decrypts the result only if it gets the
// same name.
func (k *Key) Seal(name string, plain []byte) []byte {
	aead := k.aead()
	nonce := make([]byte, aead.NonceSize())
	rand.Read(nonce)
	return aead.Seal(nonce, nonce, plain, []byte(name))
}

// Open decrypts a result of Seal. It returns an error if the key or the name is a different one, or if the data was
// changed.
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
		panic(err) // only for key sizes that AES does not support
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic(err)
	}
	return aead
}
