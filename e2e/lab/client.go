package lab

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// REST sends REST requests to one member.
type REST struct {
	Host  string
	Token string
	HTTP  *http.Client
	// Secure makes requests use https. HTTP must then be a client that is configured for TLS, such as HTTPS returns.
	Secure bool
	// Check, if set, is called with each request and its response. If it returns an error, Do returns the error.
	Check func(port int, method, path string, body []byte, a *Answer) error
}

// HTTPS returns an HTTP client for members that use TLS. The caller must call its CloseIdleConnections.
func HTTPS(config *tls.Config) *http.Client {
	return &http.Client{Transport: &http.Transport{TLSClientConfig: config.Clone(), ForceAttemptHTTP2: true}}
}

// Answer is a REST response, decoded from the JSON envelope that all of the API's responses have.
type Answer struct {
	Status int
	Header http.Header
	Data   json.RawMessage
	Error  struct {
		Code, Message string
		Details       json.RawMessage
	}
	Meta struct {
		RequestID string `json:"request_id"`
		Timestamp string `json:"timestamp"`
	}
	// Raw is the complete body as it was received.
	Raw string
}

// Do sends a request to a port of the member and decodes the response, whatever its status. A body that is a string is
// sent unchanged; any other body is marshaled to JSON. The request is strict, so that a misspelled field is an error.
// header lists names and values alternately.
func (c *REST) Do(ctx context.Context, port int, method, path string, body any, header ...string) (*Answer, error) {
	var sent []byte
	switch b := body.(type) {
	case nil:
	case string:
		sent = []byte(b)
	default:
		text, err := json.Marshal(b)
		if err != nil {
			return nil, err
		}
		sent = text
	}
	var content io.Reader
	if body != nil {
		content = bytes.NewReader(sent)
	}
	scheme := "http"
	if c.Secure {
		scheme = "https"
	}
	r, err := http.NewRequestWithContext(ctx, method, fmt.Sprintf("%s://%s:%d%s", scheme, c.Host, port, path), content)
	if err != nil {
		return nil, err
	}
	if content != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	r.Header.Set("Trivet-Strict", "true")
	if c.Token != "" {
		r.Header.Set("Authorization", "Bearer "+c.Token)
	}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	client := c.HTTP
	if client == nil {
		client = http.DefaultClient
	}
	resp, err := client.Do(r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	if err != nil {
		return nil, err
	}
	a := &Answer{Status: resp.StatusCode, Header: resp.Header, Raw: string(text)}
	if err := json.Unmarshal(text, a); err != nil {
		return nil, fmt.Errorf("%s %s: %s: not an envelope: %q", method, path, resp.Status, text)
	}
	if c.Check != nil {
		return a, c.Check(port, method, path, sent, a)
	}
	return a, nil
}

// VM holds those fields of a VM in REST responses that tests and benchmarks read.
type VM struct {
	ID, Name, State string
	NodeID          string `json:"node_id"`
	CPUs            uint32 `json:"cpus"`
	MemoryMB        uint64 `json:"memory_mb"`
}

// Call sends a request to the VM controller (port 8084). It returns an error for a status of 300 or more. Otherwise it
// decodes the response's data into out, if out is not nil.
func (c *REST) Call(ctx context.Context, method, path string, body, out any, header ...string) error {
	a, err := c.Do(ctx, 8084, method, path, body, header...)
	if err != nil {
		return err
	}
	if a.Status >= 300 {
		return fmt.Errorf("%s %s: %d %s: %s", method, path, a.Status, a.Error.Code, a.Error.Message)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(a.Data, out)
}

// IssueToken requests an access token for a user from the identity service (port 8083) over REST. more holds additional
// fields of the request.
func (c *REST) IssueToken(ctx context.Context, user, password string, more map[string]any) (string, error) {
	body := map[string]any{"username": user, "password": password}
	for k, v := range more {
		body[k] = v
	}
	a, err := c.Do(ctx, 8083, http.MethodPost, "/api/v1/auth/token", body)
	if err != nil {
		return "", err
	}
	var out struct{ Token string }
	if err := json.Unmarshal(a.Data, &out); err != nil || out.Token == "" {
		return "", fmt.Errorf("ask for a token: %s", a.Raw)
	}
	return out.Token, nil
}

// GRPC holds clients of a member's gRPC services. They share one connection and authenticate with the same token.
type GRPC struct {
	conn     *grpc.ClientConn
	VMs      vmv1.VmServiceClient
	Images   vmv1.ImageServiceClient
	Nodes    vmv1.NodeServiceClient
	Volumes  vmv1.VolumeServiceClient
	Operator operatorv1.OperatorServiceClient
	Identity identityv1.IdentityServiceClient
}

type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	if b == "" {
		return nil, nil
	}
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

func (bearer) RequireTransportSecurity() bool { return false }

// Dial returns clients that connect to a member in plaintext and authenticate with token, unless it is "".
func Dial(host, token string) (*GRPC, error) { return DialTLS(host, token, nil) }

// DialTLS is like Dial, but its clients use TLS unless config is nil.
func DialTLS(host, token string, config *tls.Config) (*GRPC, error) {
	secure := insecure.NewCredentials()
	if config != nil {
		secure = credentials.NewTLS(config)
	}
	conn, err := grpc.NewClient("passthrough:///"+host+":50051", grpc.WithTransportCredentials(secure),
		grpc.WithPerRPCCredentials(bearer(token)), grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second}))
	if err != nil {
		return nil, err
	}
	return &GRPC{
		conn: conn, VMs: vmv1.NewVmServiceClient(conn), Images: vmv1.NewImageServiceClient(conn), Nodes: vmv1.NewNodeServiceClient(conn),
		Volumes: vmv1.NewVolumeServiceClient(conn), Operator: operatorv1.NewOperatorServiceClient(conn), Identity: identityv1.NewIdentityServiceClient(conn),
	}, nil
}

// Conn returns the connection that the clients share, for use with Invoke or with clients of other services.
func (g *GRPC) Conn() *grpc.ClientConn { return g.conn }

func (g *GRPC) Close() error { return g.conn.Close() }

// WithKey returns a context with which every gRPC call sends an idempotency key as metadata.
func WithKey(ctx context.Context, key string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "idempotency-key", key)
}
