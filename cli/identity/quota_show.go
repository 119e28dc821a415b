package identity

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/show"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// readableQuota returns the quota and the usage of an org or project, or nil if the caller may not read them: a user with
// a role in a project may see its org, but not the quota of the org.
func readableQuota(ctx context.Context, client identityv1.IdentityServiceClient, of *identityv1.GetQuotaRequest) (*identityv1.QuotaStatus, error) {
	q, err := client.GetQuota(ctx, of)
	if status.Code(err) == codes.PermissionDenied {
		return nil, nil
	}
	return q, err
}

// withQuota returns the document of an org or a project for -o json, with the members quota and used, as in the document
// of `trivet quota show`. They are null if q is nil.
func withQuota(m proto.Message, q *identityv1.QuotaStatus) show.Object {
	quota, used := show.Member{Key: "quota"}, show.Member{Key: "used"}
	if q != nil {
		quota.Value, used.Value = show.Document(quotaOrEmpty(q.GetQuota())), show.Document(q.GetUsed())
	}
	return append(show.Document(m), quota, used)
}

// quotaFields returns a line for each resource in of that is used or has a limit other than the default, such as
// "vcpus: 4 of 16". The number of projects of an org is always shown.
func quotaFields(q *identityv1.QuotaStatus, of []quotaResource) (f [][2]string) {
	if q == nil {
		return nil
	}
	quota := quotaOrEmpty(q.GetQuota())
	for _, r := range of {
		used := r.used(q.GetUsed())
		if used == 0 && *r.limit(quota) == nil && r.name != projectsResource.name {
			continue
		}
		text := r.text(used)
		if limit := r.limitText(quota); limit != unlimited {
			text += " of " + limit
		}
		f = append(f, [2]string{r.title(), text})
	}
	return f
}
