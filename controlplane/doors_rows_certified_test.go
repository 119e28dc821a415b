package main

const (
	agentService = "agents /agent.v1.AgentService/"
	agentNodes   = "agents /vmcontroller.v1.NodeService/"
	peerService  = "peers /peer.v1.PeerService/"
)

// certifiedRows are those of the ports of hosts and members.
var certifiedRows = []row{
	{name: agentService + "Join", ask: `{"protocol":1,"token":"$ticket","name":"rack-1","csr":"$csr"}`, right: "OK", but: byTicket},
	{name: agentService + "Renew", ask: `{}`, right: "INVALID_ARGUMENT"},
	{name: agentService + "Watch", ask: `{"protocol":1}`, right: "OK"},
	{name: agentService + "Report", ask: `{}`, right: "OK"},
	{name: agentService + "ReadImage", ask: `{"sha256":"$sum"}`, right: "NOT_FOUND"},
	{name: agentService + "SendConsole", ask: `{"request_id":"x"}`, right: "NOT_FOUND"},
	{name: "agents /member.v1.MemberService/BringKey", ask: `{}`, right: "FAILED_PRECONDITION", but: byInvitation},
	{name: agentNodes + "HeartbeatNode", ask: `$beat`, right: "OK"},
	{name: agentNodes + "ListNodes", ask: `{}`, right: "UNIMPLEMENTED"},
	{name: agentNodes + "GetNode", ask: `{}`, right: "UNIMPLEMENTED"},
	{name: agentNodes + "CordonNode", ask: `{}`, right: "UNIMPLEMENTED"},
	{name: agentNodes + "UncordonNode", ask: `{}`, right: "UNIMPLEMENTED"},
	{name: agentNodes + "DrainNode", ask: `{}`, right: "UNIMPLEMENTED"},
	{name: peerService + "SendSnapshot", ask: `{}`, right: "PERMISSION_DENIED", but: stranger},
	{name: peerService + "Call", ask: `{}`, right: "PERMISSION_DENIED", but: stranger},
	{name: peerService + "Open", ask: `{}`, right: "PERMISSION_DENIED", but: stranger},
	{name: peerService + "ReadImage", ask: `{"sha256":"$sum"}`, right: "PERMISSION_DENIED", but: stranger},
}

var stranger = []exception{{why: "the certificate is good, but a lone member knows no other"}}

var byTicket = []exception{{[]string{"no certificate"}, "OK", "a join token, which the request brings, gets a host its certificate"}}

var byInvitation = []exception{{[]string{"no certificate"}, "FAILED_PRECONDITION", "a member's token, which the request brings, gets a member the cluster key"}}
