package main

const (
	agentService = "agents /agent.v1.AgentService/"
	agentNodes   = "agents /vmcontroller.v1.NodeService/"
	peerService  = "peers /peer.v1.PeerService/"
)

// certifiedRows lists the rows of the authorization matrix for the ports for hosts and members, which require a client
// certificate.
var certifiedRows = []row{
	{name: agentService + "Join", body: `{"protocol":1,"token":"$ticket","name":"rack-1","csr":"$csr"}`, allowed: "OK"},
	{name: agentService + "Renew", body: `{}`, allowed: "INVALID_ARGUMENT"},
	{name: agentService + "Watch", body: `{"protocol":1}`, allowed: "OK"},
	{name: agentService + "Report", body: `{}`, allowed: "OK"},
	{name: agentService + "ReadImage", body: `{"sha256":"$sum"}`, allowed: "NOT_FOUND"},
	{name: agentService + "SendConsole", body: `{"request_id":"x"}`, allowed: "NOT_FOUND"},
	{name: agentService + "StreamConsole", body: `{"request_id":"x"}`, allowed: "NOT_FOUND"},
	{name: agentService + "SendSnapshot", body: `{"request_id":"x"}`, allowed: "NOT_FOUND"},
	{name: agentService + "SendGuestResult", body: `{"request_id":"x"}`, allowed: "NOT_FOUND"},
	{name: agentService + "SyncNetworks", body: `{"protocol":1,"host":{"vtep":"192.0.2.1"}}`, allowed: "OK"},
	{name: "agents /member.v1.MemberService/BringKey", body: `{}`, allowed: "FAILED_PRECONDITION"},
	{name: agentNodes + "HeartbeatNode", body: `$beat`, allowed: "OK"},
	{name: agentNodes + "ListNodes", body: `{}`, allowed: "UNIMPLEMENTED"},
	{name: agentNodes + "GetNode", body: `{}`, allowed: "UNIMPLEMENTED"},
	{name: agentNodes + "CordonNode", body: `{}`, allowed: "UNIMPLEMENTED"},
	{name: agentNodes + "UncordonNode", body: `{}`, allowed: "UNIMPLEMENTED"},
	{name: agentNodes + "DrainNode", body: `{}`, allowed: "UNIMPLEMENTED"},
	{name: peerService + "SendSnapshot", body: `{}`, allowed: "PERMISSION_DENIED", exceptions: unknownMember},
	{name: peerService + "Call", body: `{}`, allowed: "PERMISSION_DENIED", exceptions: unknownMember},
	{name: peerService + "Open", body: `{}`, allowed: "PERMISSION_DENIED", exceptions: unknownMember},
	{name: peerService + "Exchange", body: `{}`, allowed: "PERMISSION_DENIED", exceptions: unknownMember},
	{name: peerService + "ReadImage", body: `{"sha256":"$sum"}`, allowed: "PERMISSION_DENIED", exceptions: unknownMember},
	{name: peerService + "StoreImagePart", body: `{"sha256":"$sum"}`, allowed: "PERMISSION_DENIED", exceptions: unknownMember},
}

var unknownMember = []exception{{why: "the certificate is good, but a lone member knows no other"}}
