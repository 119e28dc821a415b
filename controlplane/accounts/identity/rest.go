package identity

import (
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Routes adds the endpoints of part 4.6 of the wire contract, and the OpenID discovery endpoints. If open is false, the
// endpoints that create and list users and projects accept only clients on loopback.
func (s *Service) Routes(r *rest.Server, open bool) {
	const reason = "the wire contract (docs/api.md): REST of identity requires no credential"
	near := func(h rest.Handler) rest.Handler {
		return func(w *rest.Response, r *http.Request) (any, error) {
			if !open && !rest.FromLoopback(r) {
				return nil, fault.New(fault.PermissionDenied,
					"this endpoint asks for no credential, so it answers on loopback only: use gRPC with a token, or set rest.open: [identity]")
			}
			return h(w, r)
		}
	}
	r.HandleOpen(http.MethodPost, "/api/v1/auth/token", reason, s.postToken, rest.Takes(tokenBody{}), rest.Returns(http.StatusOK, tokenAnswer{}),
		rest.Summary("Issues a token. With a wrong password or none, the token is unauthenticated, and no call accepts it."))
	r.HandleOpen(http.MethodPost, "/api/v1/auth/verify", reason, s.postVerify, rest.Takes(verifyBody{}), rest.Returns(http.StatusOK, verifyAnswer{}),
		rest.Summary("Returns the holder of a token and the names of the holder's roles. A token that is not valid is 200 with valid false."))
	r.HandleOpen(http.MethodPost, "/api/v1/users", reason, near(s.postUser), rest.Takes(nameBody{}), rest.Returns(http.StatusCreated, userBody{}),
		rest.Summary("Registers a name without a credential or a role. Only for callers on loopback, unless rest.open has identity."))
	r.HandleOpen(http.MethodGet, "/api/v1/users", reason, near(s.getUsers), rest.Query("page_token"), rest.Returns(http.StatusOK, usersAnswer{}),
		rest.Summary("Lists users by ID, 100 at a time. Only for callers on loopback, unless rest.open has identity."))
	r.HandleOpen(http.MethodPost, "/api/v1/projects", reason, near(s.postProject), rest.Takes(nameBody{}), rest.Returns(http.StatusNotImplemented, projectBody{}),
		rest.Summary("Creates nothing, and returns 501: see POST /api/v1/identity/projects."))
	r.HandleOpen(http.MethodGet, "/api/v1/projects", reason, near(s.getProjects), rest.Returns(http.StatusOK, projectsAnswer{}),
		rest.Summary("Returns a list with one fixed project: see GET /api/v1/identity/projects."))
	const public = "public keys that verify the tokens of this cloud"
	r.HandleBare(http.MethodGet, "/.well-known/openid-configuration", public, s.getDiscovery, rest.ReturnsBare("application/json", map[string]any{}),
		rest.Summary("Returns the metadata of OpenID Connect Discovery 1.0."))
	r.HandleBare(http.MethodGet, "/.well-known/jwks.json", public, s.getKeys, rest.ReturnsBare("application/json", map[string]any{}),
		rest.Summary("Returns the public keys of tokens as a JWK set (RFC 7517)."))
	s.rpcRoutes(r)
}

type tokenBody struct {
	// The ID of a user, or the name of a service account. Required without principal_id.
	Username string `json:"username"`
	// The password of the user, or the secret of the service account. Without it, the token is unauthenticated: no
	// call accepts it.
	Password string `json:"password"`
	// How long the token is valid, in seconds. Absent or 0 means 3600; at most 2592000 (30 days).
	TTLSeconds *uint64 `json:"ttl_seconds"`
	// The org to which the token is limited.
	OrgID string `json:"org_id"`
	// The project to which the token is limited.
	ProjectID string `json:"project_id"`
	// The fields of the older form of the request (part 9.4 of the wire contract):
	// Older form of username.
	PrincipalID string `json:"principal_id"`
	// Older form: user or service_account.
	PrincipalType string `json:"principal_type"`
	// Older form of project_id.
	ScopeID string `json:"scope_id"`
}

type tokenAnswer struct {
	// A JWT, for the header Authorization.
	Token string `json:"token"`
	// When the token ends, as in RFC 3339.
	ExpiresAt string `json:"expires_at"`
}

// postToken issues a token to any caller, as the wire contract requires. If the password is wrong or missing, the token
// is marked as unauthenticated and grants no access.
func (s *Service) postToken(w *rest.Response, r *http.Request) (any, error) {
	w.Failure = "TOKEN_ISSUE_FAILED"
	var in tokenBody
	if _, err := rest.Decode(r, &in); err != nil {
		return nil, err
	}
	q, err := legacyRequest{in.PrincipalID, in.PrincipalType, in.ScopeID}.mergeInto(tokenRequest{
		User: cloud.UserID(in.Username), Password: in.Password, Address: r.RemoteAddr, RequestID: rest.RequestID(r.Context()),
		Org: in.OrgID, Project: in.ProjectID,
	})
	if err != nil {
		return nil, err
	}
	if in.TTLSeconds != nil {
		q.TTL = *in.TTLSeconds
	}
	made, _, err := s.token(r.Context(), q)
	if f, ok := fault.From(err); ok && f.Kind == fault.ResourceExhausted {
		// Identity REST has no code for rate limits (part 7.3 of the wire contract), so respond 503 with Retry-After.
		return nil, fault.New(fault.Unavailable, "%s", f.Message).MayRetry().Because(err)
	}
	if err != nil {
		return nil, err
	}
	return tokenAnswer{Token: made.text, ExpiresAt: made.expires.UTC().Format(time.RFC3339)}, nil
}

// legacyRequest holds the fields of the older form of a request for a token.
type legacyRequest struct{ principal, kind, scope string }

// mergeInto returns the request q with its empty fields set from the older form o. It returns InvalidArgument if the
// user name is missing or malformed, or the kind of principal is unknown.
func (o legacyRequest) mergeInto(q tokenRequest) (tokenRequest, error) {
	if q.User == "" {
		q.User = cloud.UserID(o.principal)
	}
	if q.Project == "" {
		q.Project = o.scope
	}
	switch strings.ToLower(o.kind) {
	case "":
	case token.User:
		q.Kind = token.User
	case token.ServiceAccount, "serviceaccount":
		q.Kind = token.ServiceAccount
	default:
		return q, fault.Invalid("principal_type", "want user or service_account")
	}
	if q.User == "" {
		return q, fault.Invalid("username", "is required")
	}
	if _, _, ok := principal.ParseAccountName(string(q.User)); ok {
		return q, nil
	}
	return q, cloud.CheckCallerID("username", string(q.User))
}

type verifyBody struct {
	// A token of this cloud.
	Token *string `json:"token" api:"required"`
}

type verifyAnswer struct {
	// False for a token that is not valid; the other fields are then null.
	Valid bool `json:"valid"`
	// The ID of the holder.
	PrincipalID *string `json:"principal_id"`
	// The holder's display name.
	PrincipalName *string `json:"principal_name"`
	// The names of the holder's present roles, in order. Empty for an unauthenticated token.
	Roles []string `json:"roles" api:"null"`
}

func (s *Service) postVerify(_ *rest.Response, r *http.Request) (any, error) {
	var in verifyBody
	if _, err := rest.Decode(r, &in); err != nil {
		return nil, err
	}
	if in.Token == nil {
		return nil, fault.Invalid("token", "is required")
	}
	caller, err := s.Verify(r.Context(), *in.Token)
	if fault.Is(err, fault.Unauthenticated) {
		return verifyAnswer{}, nil
	}
	if err != nil {
		return nil, err
	}
	who, err := s.holder(r.Context(), caller)
	if err != nil {
		return nil, err
	}
	answer := verifyAnswer{Valid: true, PrincipalID: &who.PrincipalId, PrincipalName: &who.PrincipalName, Roles: []string{}}
	for _, b := range caller.Bindings {
		if role := string(b.Role); !slices.Contains(answer.Roles, role) {
			answer.Roles = append(answer.Roles, role)
		}
	}
	slices.Sort(answer.Roles)
	return answer, nil
}

// nameBody is the JSON body that creates a user or a project.
type nameBody struct {
	// 1 to 63 of A-Z a-z 0-9 . _ @ -.
	ID *string `json:"id" api:"required"`
	// The display name.
	Name *string `json:"name" api:"required"`
}

type usersAnswer struct {
	// At most 100, in the order of their IDs.
	Users []userBody `json:"users"`
	// Absent on the last page.
	Next string `json:"next_page_token,omitempty"`
}

type userBody struct {
	// The ID of the user.
	ID string `json:"id"`
	// The display name.
	Name string `json:"name"`
	// User or ServiceAccount.
	Kind string `json:"kind"`
}

func onREST(u *principal.User) userBody {
	return userBody{ID: string(u.ID), Name: u.Name, Kind: string(u.Kind())}
}

// postUser registers a name, which gives no access until the user gets a credential.
func (s *Service) postUser(w *rest.Response, r *http.Request) (any, error) {
	var in nameBody
	if _, err := rest.Decode(r, &in); err != nil {
		return nil, err
	}
	if in.ID == nil {
		return nil, fault.Invalid("id", "is required")
	}
	if in.Name == nil {
		return nil, fault.Invalid("name", "is required")
	}
	if err := s.names.pass(time.Now()); err != nil {
		return nil, withErrorCode(w, "USER_CREATE_FAILED", err)
	}
	u, err := createUserCommand.Call(r.Context(), s.opts.Commands, newName{ID: cloud.UserID(*in.ID), Name: *in.Name, Open: true})
	if err != nil {
		return nil, withErrorCode(w, "USER_CREATE_FAILED", err)
	}
	s.opts.Audit.Note(audit.Record{
		Method: service + "CreateUser", Target: "id=" + string(u.ID), Outcome: audit.OK, RequestID: rest.RequestID(r.Context()), Address: rest.Remote(r),
		Message: "registered without a token",
	})
	w.Status = http.StatusCreated
	return onREST(&u), nil
}

// withErrorCode sets the error code of the REST response to code, which depends on the operation. It returns err
// unchanged if the request is invalid or refused, or a backend is unreachable. Other errors become internal errors
// (part 7.3 of the wire contract).
func withErrorCode(w *rest.Response, code string, err error) error {
	w.Failure = code
	f, ok := fault.From(err)
	if !ok {
		return err
	}
	switch f.Kind {
	case fault.InvalidArgument, fault.PermissionDenied, fault.Unavailable, fault.DeadlineExceeded, fault.TooLarge:
		return err
	}
	own := fault.New(fault.Internal, "%s", f.Message).Because(err)
	if f.Retry {
		own = own.MayRetry()
	}
	return own
}

// getUsers returns a page of the users, sorted by ID. In addition to the wire contract it accepts the parameter
// page_token.
func (s *Service) getUsers(w *rest.Response, r *http.Request) (any, error) {
	list, next, err := s.users(r.Context(), 0, r.URL.Query().Get("page_token"))
	if err != nil {
		return nil, withErrorCode(w, "USER_LIST_FAILED", err)
	}
	answer := usersAnswer{Users: []userBody{}, Next: next}
	for _, u := range list {
		answer.Users = append(answer.Users, onREST(u))
	}
	return answer, nil
}

type projectBody struct {
	// The ID of the project.
	ID string `json:"id"`
	// The display name.
	Name string `json:"name"`
}

type projectsAnswer struct {
	// One fixed entry.
	Projects []projectBody `json:"projects"`
}

// getProjects returns a list with only the default project, as the wire contract requires. The list of the projects in
// which a caller has a role is available over gRPC.
func (s *Service) getProjects(*rest.Response, *http.Request) (any, error) {
	return projectsAnswer{[]projectBody{{ID: string(tenant.Default.Project), Name: "Default"}}}, nil
}

// postProject responds 501 Not Implemented, as part 4.6 of the wire contract requires.
func (s *Service) postProject(w *rest.Response, r *http.Request) (any, error) {
	var in nameBody
	if _, err := rest.Decode(r, &in); err != nil {
		return nil, err
	}
	if in.ID == nil {
		return nil, fault.Invalid("id", "is required")
	}
	if in.Name == nil {
		return nil, fault.Invalid("name", "is required")
	}
	w.Status = http.StatusNotImplemented
	return projectBody{ID: *in.ID, Name: *in.Name}, nil
}

// getDiscovery returns the fields of OpenID Connect Discovery 1.0 part 4.2 that a program needs to verify tokens.
func (s *Service) getDiscovery(w *rest.Response, _ *http.Request) (any, error) {
	return s.rawResponse(w, map[string]any{
		"issuer":                                s.opts.Issuer,
		"jwks_uri":                              s.opts.Issuer + "/.well-known/jwks.json",
		"token_endpoint":                        s.opts.Issuer + "/api/v1/auth/token",
		"response_types_supported":              []string{"token"},
		"subject_types_supported":               []string{"public"},
		"id_token_signing_alg_values_supported": []string{"EdDSA"},
		"scopes_supported":                      []string{"openid"},
		"claims_supported":                      []string{"iss", "sub", "aud", "exp", "iat", "jti", "kind", "scope", "proof", "cluster"},
	})
}

func (s *Service) getKeys(w *rest.Response, r *http.Request) (any, error) {
	ring, err := s.recentRing(r.Context())
	if err != nil {
		return nil, err
	}
	if ring == nil {
		return nil, errSettingUp()
	}
	keys := ring.Published()
	if mutant.On(mutant.PublishUnproven) {
		keys.Keys = append(keys.Keys, jose.JSONWebKey{Key: s.unprovenKey.Public(), KeyID: unprovenKeyID, Algorithm: string(jose.EdDSA), Use: "sig"})
	}
	return s.rawResponse(w, keys)
}

// rawResponse returns the JSON of v without the usual envelope of Trivet's REST responses. Clients may cache the
// response for 300 s.
func (s *Service) rawResponse(w *rest.Response, v any) (any, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	w.Header().Set("Cache-Control", "public, max-age=300")
	w.Header().Set("Access-Control-Allow-Origin", "*")
	return rest.Verbatim{Body: io.NopCloser(strings.NewReader(string(text)))}, nil
}
