package jointoken

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	memberv1 "github.com/trivet-cloud/trivet/protos/member/v1"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// proofFile holds the key with which a joining process may repeat its request, PKCS #8 in PEM, until the process has
// the cluster key.
const proofFile = "join.key"

const (
	// askTime limits a call to one member; askPause is the pause after all members failed.
	askTime  = 10 * time.Second
	askPause = time.Second
)

// final holds the status codes of errors that would be the same the next time.
var final = map[codes.Code]bool{
	codes.InvalidArgument: true, codes.Unauthenticated: true, codes.PermissionDenied: true, codes.FailedPrecondition: true, codes.Unimplemented: true,
}

// ReadToken returns the token in a file, and the pin in the token.
func ReadToken(path string) (token, pin string, err error) {
	f, err := os.Open(path)
	if err != nil {
		return "", "", fmt.Errorf("open join token: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxText+1))
	if err != nil {
		return "", "", fmt.Errorf("read join token: %w", err)
	}
	token = strings.TrimSpace(string(text))
	parts := strings.Split(token, ".")
	if len(parts) != 3 || len(token) > maxText || parts[0] == "" || parts[1] == "" || len(parts[2]) != 64 {
		return "", "", fmt.Errorf("%s does not hold a token that `trivet cluster token` prints", path)
	}
	return token, parts[2], nil
}

// Bring exchanges the token in a file for the cluster key, at one of the members' ports for agents (host:port), and
// writes the key to the file to, mode 0600, before it returns. It retries until a member responds. An error is
// permanent: the token is refused, no member belongs to the token's cluster, or the directory cannot be written.
func Bring(ctx context.Context, members []string, tokenFile, to string, log *slog.Logger) error {
	token, pin, err := ReadToken(tokenFile)
	if err != nil {
		return err
	}
	dir := filepath.Dir(to)
	proof, err := openProof(dir)
	if err != nil {
		return err
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, proof)
	if err != nil {
		return fmt.Errorf("make certificate request: %w", err)
	}
	q := &memberv1.BringKeyRequest{Protocol: Protocol, Token: token, Csr: csr}
	text, err := askUntilAnswered(ctx, members, pin, q, log)
	if err != nil {
		return fmt.Errorf("get the cluster key: %w", err)
	}
	key, err := clusterkey.Parse(text)
	if err != nil {
		return fmt.Errorf("get the cluster key: %w", err)
	}
	if authority, err := key.Authority(); err != nil {
		return err
	} else if mtls.Pin(authority.Certificate()) != pin {
		return errors.New("get the cluster key: the received key belongs to another cluster than the token")
	}
	if err := keep(to, []byte(key.Encode())); err != nil {
		return fmt.Errorf("keep the cluster key: %w", err)
	}
	if err := os.Remove(filepath.Join(dir, proofFile)); err != nil {
		return fmt.Errorf("remove %s, which is no longer needed: %w", proofFile, err)
	}
	log.Info("got the cluster key; the token is used up")
	return nil
}

// askUntilAnswered calls the members in turn until one returns the key or a permanent error.
func askUntilAnswered(ctx context.Context, members []string, pin string, q *memberv1.BringKeyRequest, log *slog.Logger) (string, error) {
	logged := ""
	for {
		var problems []error
		foreign := 0
		for _, member := range members {
			text, isForeign, err := ask(ctx, member, pin, q)
			switch {
			case err == nil:
				return text, nil
			case ctx.Err() != nil:
				return "", ctx.Err()
			case final[status.Code(err)]:
				return "", fmt.Errorf("%s: %w", member, err)
			case isForeign:
				foreign++
			}
			problems = append(problems, fmt.Errorf("%s: %w", member, err))
		}
		err := errors.Join(problems...)
		if foreign == len(members) {
			return "", err
		}
		if text := err.Error(); text != logged {
			logged = text
			log.Info("waiting for the cluster key", "why", text)
		}
		select {
		case <-time.After(askPause):
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
}

// ask sends the request to one member. isForeign reports that the server at the address does not belong to the token's
// cluster; such a server receives no data.
func ask(ctx context.Context, member, pin string, q *memberv1.BringKeyRequest) (text string, isForeign bool, err error) {
	config := mtls.ClientPinned(pin)
	verify := config.VerifyConnection
	refused := make(chan error, 1)
	config.VerifyConnection = func(state tls.ConnectionState) error {
		err := verify(state)
		if err != nil {
			select {
			case refused <- err:
			default:
			}
		}
		return err
	}
	conn, err := grpc.NewClient("passthrough:///"+member, grpc.WithTransportCredentials(credentials.NewTLS(config)), grpc.WithDisableServiceConfig())
	if err != nil {
		return "", false, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	answer, err := memberv1.NewMemberServiceClient(conn).BringKey(ctx, q)
	if err == nil {
		return answer.GetClusterKey(), false, nil
	}
	select {
	case why := <-refused:
		return "", true, why
	default:
		return "", false, err
	}
}

// openProof returns the key in proofFile, and creates it if needed.
func openProof(dir string) (ed25519.PrivateKey, error) {
	path := filepath.Join(dir, proofFile)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		_, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			return nil, fmt.Errorf("make %s: %w", proofFile, err)
		}
		der, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			return nil, fmt.Errorf("make %s: %w", proofFile, err)
		}
		return key, keep(path, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", proofFile, err)
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, fmt.Errorf("%s is damaged: no PEM in it", path)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s is damaged: %w", path, err)
	}
	key, ok := parsed.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("%s is not an Ed25519 key", path)
	}
	return key, nil
}

// keep writes a file, mode 0600, atomically and durably.
func keep(path string, data []byte) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+"-*") // 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
