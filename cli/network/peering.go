package network

import (
	"context"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

func peerings() *kind[*networkv1.Peering] {
	return &kind[*networkv1.Peering]{
		command: "peering", noun: "peering", arg: "PEERING",
		header:    []string{"NAME", "VPC", "PEER VPC", "STATUS"},
		wideInAll: []string{"VPC"},
		max:       map[string]int{"VPC": 24, "PEER VPC": 24},
		row: func(p *networkv1.Peering, l *labels) []string {
			return []string{
				nameOf(p), p.GetProjectId() + "/" + l.of(vpcs(), p.GetVpcId()),
				peerPrefix(p) + "/" + l.of(vpcs(), p.GetPeerVpcId()), status(p),
			}
		},
		fields: func(p *networkv1.Peering, l *labels) [][2]string {
			return [][2]string{
				{"VPC", l.of(vpcs(), p.GetVpcId())}, {"Peer tenant", p.GetPeerOrgId() + "/" + p.GetPeerProjectId()},
				{"Peer VPC", l.of(vpcs(), p.GetPeerVpcId())},
			}
		},
		about: func(p *networkv1.Peering) string {
			return "proposed by " + p.GetOrgId() + "/" + p.GetProjectId() + ", " + status(p)
		},
		page: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.Peering, string, error) {
			page, err := c.ListPeerings(ctx, &networkv1.ListPeeringsRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token, Name: q.name,
				VpcId: q.vpc,
			})
			return page.GetPeerings(), page.GetNextPageToken(), err
		},
		everywhere: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.Peering, string, error) {
			page, err := c.ListAllPeerings(ctx, &networkv1.ListAllPeeringsRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token,
			})
			return page.GetPeerings(), page.GetNextPageToken(), err
		},
		get: func(ctx context.Context, t *target, id string) (*networkv1.Peering, error) {
			return t.client.GetPeering(ctx, &networkv1.GetPeeringRequest{OrgId: t.org, ProjectId: t.project, Id: id})
		},
		remove: func(ctx context.Context, t *target, id string) error {
			_, err := t.client.DeletePeering(ctx, &networkv1.DeletePeeringRequest{OrgId: t.org, ProjectId: t.project, Id: id})
			return err
		},
	}
}

// peerPrefix returns the peer's project, with its org if that is another one than the proposer's.
func peerPrefix(p *networkv1.Peering) string {
	if p.GetPeerOrgId() == p.GetOrgId() {
		return p.GetPeerProjectId()
	}
	return p.GetPeerOrgId() + "/" + p.GetPeerProjectId()
}

// peeringCommand returns the command `trivet network peering`.
func peeringCommand(s *session.Session) *cobra.Command {
	c := group("peering", "Connect VPCs with each other",
		`Connect VPCs with each other. One project proposes a peering, and the project of the other VPC accepts it; between
VPCs of one project it is accepted at once. Then routes of both sides must lead to the peering. The prefixes of the
VPCs must not overlap.`,
		`  trivet network peering create office --vpc prod --peer-vpc 0192f0c1-9d3c-7a51-8f2b-6f1c5a3e7d20 --peer-project office
  trivet network peering accept office --project office
  trivet network route add out 10.8.0.0/16=peering:office`)
	c.AddCommand(createPeeringCommand(s), acceptPeeringCommand(s), peerings().listCommand(s, inVPC()),
		peerings().showCommand(s, "Show a peering"), updatePeeringCommand(s),
		peerings().deleteCommand(s, "End a peering, or refuse a proposal"))
	return c
}

func createPeeringCommand(s *session.Session) *cobra.Command {
	req := &networkv1.CreatePeeringRequest{}
	var vpc, peer string
	c := &cobra.Command{
		Use: "create [NAME]", Short: "Propose to connect two VPCs", Args: optionalName,
		Long: `Propose to connect two VPCs. --peer-vpc is the name or ID of the other VPC; name its project with --peer-project if
that is another one. Looking up a name in another project requires a role there; an ID needs none.`,
		Example: `  trivet network peering create --vpc prod --peer-vpc lab
  trivet network peering create office --vpc prod --peer-project office --peer-vpc 0192f0c1-9d3c-7a51-8f2b-6f1c5a3e7d20`,
	}
	refFlag(c, s, &vpc, "vpc", "VPC of the project, by name or ID", vpcs())
	refFlag(c, s, &peer, "peer-vpc", "the other VPC, by name or ID", vpcs())
	c.Flags().StringVar(&req.PeerProjectId, "peer-project", "", "project of the other VPC (default: the same project)")
	c.Flags().StringVar(&req.PeerOrgId, "peer-org", "", "org of --peer-project (default: that of the project)")
	c.Flags().StringVar(&req.Description, "description", "", "description")
	session.Require(c, "vpc", "peer-vpc")
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) (err error) {
		if req.PeerOrgId != "" && req.PeerProjectId == "" {
			return session.Usagef("--peer-org needs --peer-project")
		}
		if req.Name, err = nameArg(args); err != nil {
			return err
		}
		if req.VpcId, err = vpcs().find(ctx, t, vpc); err != nil {
			return err
		}
		if req.PeerVpcId, err = findPeer(ctx, t, req.PeerOrgId, req.PeerProjectId, peer); err != nil {
			return err
		}
		if req.VpcId == req.PeerVpcId {
			return session.Usagef("--vpc and --peer-vpc are the same VPC")
		}
		req.OrgId, req.ProjectId = t.org, t.project
		p, err := t.client.CreatePeering(ctx, req)
		if err == nil && p.GetStatus() == networkv1.Status_STATUS_PENDING {
			s.Note("project %s must accept it: `trivet network peering accept %s --org %s --project %s`", peerPrefix(p), nameOf(p), p.GetPeerOrgId(), p.GetPeerProjectId())
		}
		return peerings().printMade(ctx, t, p, err)
	})
	return c
}

// findPeer returns the ID of a VPC, which may be in another project.
func findPeer(ctx context.Context, t *target, org, project, nameOrID string) (string, error) {
	q := t.query()
	if project != "" {
		q.org, q.project = org, project
	}
	id, err := vpcs().findIn(ctx, t, q, nameOrID)
	if code := grpcstatus.Code(err); project != "" && (code == codes.PermissionDenied || code == codes.NotFound) {
		return "", session.Usagef(
			"--peer-vpc %q: you cannot look up names in project %s: give the ID of the VPC", nameOrID, project,
		)
	}
	return id, err
}

func acceptPeeringCommand(s *session.Session) *cobra.Command {
	c := session.Many(peerings().argCommand(s, "accept", "Accept the proposal of another project"))
	c.Long = "Accept the proposal of another project to connect its VPC with one of this project.\n`trivet network peering delete` refuses it."
	c.Example = "  trivet network peering list\n  trivet network peering accept office"
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		t := newTarget(s, conn)
		id, err := peerings().find(ctx, t, name)
		if err != nil {
			return err
		}
		p, err := t.client.AcceptPeering(ctx, &networkv1.AcceptPeeringRequest{OrgId: t.org, ProjectId: t.project, Id: id})
		return peerings().printMade(ctx, t, p, err)
	})
	return c
}

func updatePeeringCommand(s *session.Session) *cobra.Command {
	var change changes
	c := peerings().argCommand(s, "update", "Change the name and description of a peering")
	c.Long = "Change the name and description of a peering, which both projects see. Only the project that proposed the\n" +
		"peering can change them."
	c.Example = "  trivet network peering update office --name headquarters"
	change.add(c)
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		if err := change.check(); err != nil {
			return err
		}
		id, err := peerings().find(ctx, t, args[0])
		if err != nil {
			return err
		}
		p, err := t.client.UpdatePeering(ctx, &networkv1.UpdatePeeringRequest{
			OrgId: t.org, ProjectId: t.project, Id: id, Name: change.newName(), Description: change.newDescription(),
		})
		return peerings().printMade(ctx, t, p, err)
	})
	return c
}
