package jointoken

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
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
	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// proofFile is the name of the file with the private key of the joining process, PKCS #8 in PEM. With this key the
// process can repeat its request. The file is deleted when the process has the cluster key.
const proofFile = "join.key"

const (
	// askTime is the timeout of a call to one member. askPause is the pause when the calls to all members have failed.
	askTime  = 10 * time.Second
	askPause = time.Second
)

// final holds the status codes of permanent errors. After such an error the request is not repeated.
var final = map[codes.Code]bool{
	codes.InvalidArgument: true, codes.Unauthenticated: true, codes.PermissionDenied: true, codes.FailedPrecondition: true, codes.Unimplemented: true,
}

// ReadToken reads the join token in a file. It also returns the token's pin: the fingerprint of the cluster's
// certificate authority (see mtls.Pin).
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

// Bring exchanges the join token in a file for the cluster key, and writes the key with mode 0600 to the file that the
// parameter to names. It calls the addresses in members (host:port, the ports for agents) until one responds. It
// returns an error without retrying if the token is refused, no member belongs to the token's cluster, or the key
// cannot be stored.
func Bring(ctx context.Context, members []string, tokenFile, to string, log *slog.Logger) error {
	token, pin, err := ReadToken(tokenFile)
	if err != nil {
		return err
	}
	dir := filepath.Dir(to)
	proof, err := mtls.LoadOrMakeKey(filepath.Join(dir, proofFile))
	if err != nil {
		return fmt.Errorf("key of the join request: %w", err)
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
	if err := atomicfile.WriteFile(to, []byte(key.Encode()), 0o600); err != nil {
		return fmt.Errorf("keep the cluster key: %w", err)
	}
	if err := os.Remove(filepath.Join(dir, proofFile)); err != nil {
		return fmt.Errorf("remove %s, which is no longer needed: %w", proofFile, err)
	}
	log.Info("got the cluster key; the token is used up")
	return nil
}

// askUntilAnswered sends the request to the members in turn, and repeats that after askPause, until one returns the
// cluster key or a permanent error. It also returns an error if none of the servers belongs to the token's cluster.
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

// ask sends the request to one member. isForeign is true if the server at the address does not belong to the cluster
// that issued the token. ask sends no data to such a server.
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
