package cluster

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
)

func tokenCommand(s *session.Session) *cobra.Command {
	var ttl time.Duration
	c := &cobra.Command{
		Use:   "token",
		Short: "Create a token with which a new member gets the cluster key",
		Long: `Create a one-use token. Only the token is printed on standard output. Anybody who has it can get the cluster key,
and with it full control of the cloud: keep it as secret as the key.`,
		Example: "  trivet cluster add 10.0.0.4 --id 4\n" +
			"  (umask 077; trivet cluster token > member.token)\n" +
			"  trivet-controlplane --listen 10.0.0.4 --join 10.0.0.1 --join-token member.token --data-dir ...  # on 10.0.0.4",
		Args: session.Exactly(),
	}
	c.Flags().DurationVar(&ttl, "ttl", 0, "lifetime of the token, at most 24h (default 1h)")
	c.RunE = s.Run(30*time.Second, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		if ttl < 0 || ttl%time.Second != 0 || ttl > 24*time.Hour {
			return session.Usagef("--ttl %v: want whole seconds, at most 24h", ttl)
		}
		t, err := operatorv1.NewOperatorServiceClient(conn).CreateMemberToken(ctx, &operatorv1.CreateMemberTokenRequest{TtlSeconds: uint32(ttl / time.Second)})
		if err != nil {
			return err
		}
		s.Note("valid for one member until %s", show.When(t.GetExpiresAt()))
		return s.Print(t, []string{t.GetToken()}, func(w io.Writer) error {
			_, err := fmt.Fprintln(w, t.GetToken())
			return err
		})
	})
	return c
}
