package main

// This file has the rows of the HTTP endpoints, by listener.

var restRows = []row{
	{name: "vm GET /health", path: "/health", allowed: "200"},
	{name: "vm GET /ready", path: "/ready", allowed: "200"},
	{name: "vm GET /metrics", path: "/metrics", allowed: "200"},
	{name: "vm GET /api/v1/vms", path: "/api/v1/vms", allowed: "200"},
	{name: "vm POST /api/v1/vms", path: "/api/v1/vms", body: webRequest(``), allowed: "400 INVALID_ARGUMENT"},
	{name: "vm GET /api/v1/vms/{id}", path: "/api/v1/vms/$vm", allowed: "200", otherTenant: "404 NOT_FOUND"},
	{name: "vm DELETE /api/v1/vms/{id}", path: "/api/v1/vms/$no-vm", allowed: "404 NOT_FOUND"},
	{name: "vm POST /api/v1/vms/{id}/start", path: "/api/v1/vms/$no-vm/start", allowed: "404 NOT_FOUND"},
	{name: "vm POST /api/v1/vms/{id}/stop", path: "/api/v1/vms/$no-vm/stop", allowed: "404 NOT_FOUND"},
	{name: "vm POST /api/v1/vms/{id}/migrate", path: "/api/v1/vms/$no-vm/migrate", body: `{"destination_node_id":"$uuid"}`, allowed: "404 NOT_FOUND"},

	{name: "credit GET /health", path: "/health", allowed: "200"},
	{name: "credit GET /ready", path: "/ready", allowed: "200"},
	{name: "credit POST /api/v1/wallets", path: "/api/v1/wallets", body: webRequest(`,"initial_balance":1`), allowed: "500 CREATE_FAILED", exceptions: projectIsRequired},
	{name: "credit GET /api/v1/wallets/{project_id}", path: "/api/v1/wallets/$project", allowed: "200"},
	{name: "credit POST /api/v1/wallets/{project_id}/topup", path: "/api/v1/wallets/$project/topup", body: `{"amount":5}`, allowed: "200"},
	{name: "credit GET /api/v1/wallets/{project_id}/transactions", path: "/api/v1/wallets/$project/transactions", allowed: "200"},
	{name: "credit POST /api/v1/reservations", path: "/api/v1/reservations", body: `{"project_id":"$project","amount":1}`, allowed: "201", otherTenant: "400 INVALID_ARGUMENT", exceptions: projectIsRequired},
	{name: "credit POST /api/v1/reservations/{id}/commit", path: "/api/v1/reservations/$no-reservation/commit", body: `{}`, allowed: "500 COMMIT_FAILED"},
	{name: "credit POST /api/v1/reservations/{id}/release", path: "/api/v1/reservations/$no-reservation/release", body: `{}`, allowed: "500 RELEASE_FAILED"},

	{name: "identity GET /health", path: "/health", allowed: "200"},
	{name: "identity GET /ready", path: "/ready", allowed: "200"},
	{name: "identity POST /api/v1/auth/token", path: "/api/v1/auth/token", body: `{"username":"ghost"}`, allowed: "200"},
	{name: "identity POST /api/v1/auth/verify", path: "/api/v1/auth/verify", body: `{"token":"garbage"}`, allowed: "200"},
	{name: "identity POST /api/v1/users", path: "/api/v1/users", body: `{}`, allowed: "400 INVALID_ARGUMENT"},
	{name: "identity GET /api/v1/users", path: "/api/v1/users", allowed: "200"},
	{name: "identity POST /api/v1/projects", path: "/api/v1/projects", body: `{"id":"p","name":"P"}`, allowed: "501"},
	{name: "identity GET /api/v1/projects", path: "/api/v1/projects", allowed: "200"},
	{name: "identity GET /.well-known/openid-configuration", path: "/.well-known/openid-configuration", allowed: "200"},
	{name: "identity GET /.well-known/jwks.json", path: "/.well-known/jwks.json", allowed: "200"},

	{name: "kv GET /health", path: "/health", allowed: "200"},
	{name: "kv GET /ready", path: "/ready", allowed: "200"},
	{name: "kv GET /api/v1/kv", path: "/api/v1/kv", allowed: "200"},
	{name: "kv GET /api/v1/kv/{key:.*}", path: "/api/v1/kv/none", allowed: "404 NOT_FOUND"},
	{name: "kv PUT /api/v1/kv/{key:.*}", path: "/api/v1/kv/some", body: `{"value":"v"}`, allowed: "200"},
	{name: "kv DELETE /api/v1/kv/{key:.*}", path: "/api/v1/kv/none", allowed: "200"},
	{name: "kv POST /api/v1/kv/{key:.*}/put", path: "/api/v1/kv/some/put", body: `{"value":"v"}`, allowed: "200"},
	{name: "kv POST /api/v1/kv/{key:.*}/delete", path: "/api/v1/kv/none/delete", allowed: "200"},
	{name: "kv GET /api/v1/cluster/status", path: "/api/v1/cluster/status", allowed: "200"},
	{name: "kv POST /api/v1/cluster/members", path: "/api/v1/cluster/members", body: `{}`, allowed: "400 INVALID_ARGUMENT"},
	{name: "kv DELETE /api/v1/cluster/members/{node_id}", path: "/api/v1/cluster/members/99", allowed: "412 PRECONDITION_FAILED"},
	{name: "kv POST /api/v1/cluster/leader/transfer", path: "/api/v1/cluster/leader/transfer", body: `{}`, allowed: "400 INVALID_ARGUMENT"},
	{name: "kv POST /admin/member/add", path: "/admin/member/add", body: `{}`, allowed: "400 INVALID_ARGUMENT"},

	{name: "metrics GET /metrics", path: "/metrics", allowed: "200"},
	{name: "etcd GET /metrics", path: "/metrics", allowed: "200"},
	{name: "etcd GET /version", path: "/version", allowed: "200"},
	{name: "etcd GET /health", path: "/health", allowed: "200"},
	{name: "etcd GET /livez", path: "/livez", allowed: "200"},
	{name: "etcd GET /readyz", path: "/readyz", allowed: "200"},
}

var projectIsRequired = []exception{{
	[]string{"system:admin of no project, naming none"}, "400 INVALID_ARGUMENT", "project_id is a required field of the body",
}}
