"""True edges of the recorded OpenTelemetry DAGs, written by hand.

How they were decided. An edge A -> B says that B waits for A's answer: B could not have been sent,
or not as it was, before A had answered. Spans were read in time order: who is addressed, what the
prompt repeats, quotes or sums up, and what the answer before it announced.

* Only direct edges are listed. Where A's answer reaches B by way of C, there is A -> C -> B and no
  A -> B, even if B's prompt repeats A's answer word by word, as later turns of a conversation do.
* A coordinator that says whom it sends waits for nobody yet; each specialist that it names starts
  after it and from it. Older findings that a specialist's task repeats came through it.
* The request after the specialists waits for all of them, also where its prompt holds only "What
  did your team find?" and its answer sums up what they said.
* A request that starts before A has ended does not wait for A, whatever its text says.
* Requests that share a topic or a form of question, and nothing of each other's answers, have no
  edge.
"""

import json

Edge = tuple[str, str]


def _edges(*groups: tuple[str, str]) -> frozenset[Edge]:
    """Edges from all spans of the first text to all of the second; spans by words of a text."""
    return frozenset((a, b) for left, right in groups for a in left.split() for b in right.split())


TRUE_EDGES = {
    # Three rounds: the coordinator names three specialists, a synthesis holds their prompts and
    # answers, the next user turn holds the synthesis. The specialists of the second round name the
    # first round's findings; the turn that sent them had the summary of these.
    "code_review_workflow": _edges(
        ("span_001_initial", "span_002_security span_003_performance span_004_quality"),
        ("span_002_security span_003_performance span_004_quality", "span_005_synthesis"),
        ("span_005_synthesis", "span_006_user_request_fix"),
        (
            "span_006_user_request_fix",
            "span_007_security_fix span_008_performance_fix span_009_quality_fix",
        ),
        (
            "span_007_security_fix span_008_performance_fix span_009_quality_fix",
            "span_010_refactor_synthesis",
        ),
        ("span_010_refactor_synthesis", "span_011_user_question"),
        (
            "span_011_user_question",
            "span_012_test_unit span_013_test_integration span_014_test_security",
        ),
        (
            "span_012_test_unit span_013_test_integration span_014_test_security",
            "span_015_test_synthesis",
        ),
    ),
    # Both specialists are given the coordinator's words. "What did your team find?" comes 0.5 s
    # after the second has answered and is answered with what they found. The senior analyst is
    # sent by the turn that escalates; the manager is given the analyst's words; the coordinator's
    # answer to "What's the resolution?" is the manager's.
    "customer_support_escalation": _edges(
        ("span_001_initial_complaint", "span_002_technical_analysis span_003_network_analysis"),
        (
            "span_002_technical_analysis span_003_network_analysis",
            "span_004_coordinator_synthesis",
        ),
        ("span_004_coordinator_synthesis", "span_005_customer_escalation"),
        ("span_005_customer_escalation", "span_006_senior_analysis"),
        ("span_006_senior_analysis", "span_007_manager_resolution"),
        ("span_007_manager_resolution", "span_008_final_coordination"),
        ("span_008_final_coordination", "span_009_customer_satisfaction"),
    ),
    # Three independent questions in one form; the last prompt holds all three answers.
    "fan_in_dependencies": _edges(("span_001 span_002 span_003", "span_004")),
    # As in the code review; the last round has one analyst and no synthesis.
    "multi_agent_research": _edges(
        ("span_001_coordinator", "span_002_market_agent span_003_env_agent span_004_tech_agent"),
        ("span_002_market_agent span_003_env_agent span_004_tech_agent", "span_005_synthesis"),
        ("span_005_synthesis", "span_006_user_response"),
        (
            "span_006_user_response",
            "span_007_infra_market span_008_infra_tech span_009_infra_policy",
        ),
        (
            "span_007_infra_market span_008_infra_tech span_009_infra_policy",
            "span_010_infra_synthesis",
        ),
        ("span_010_infra_synthesis", "span_011_user_followup"),
        ("span_011_user_followup", "span_012_cost_analysis"),
    ),
    # Two branches go on from the first answer at the same time and meet; then one more turn.
    "parallel_requests": _edges(
        ("span_001", "span_002 span_003"),
        ("span_002 span_003", "span_004"),
        ("span_004", "span_005"),
    ),
    # One conversation of four turns between three independent questions.
    "prefix_sharing_example": _edges(
        ("span_conv_turn1", "span_conv_turn2"),
        ("span_conv_turn2", "span_conv_turn3"),
        ("span_conv_turn3", "span_conv_turn4"),
    ),
    # Rounds of four, three and two specialists. The text of the third of the second round reads as
    # if the other two had answered, but it starts before they have: it is the coordinator's.
    "software_architecture_review": _edges(
        (
            "span_001_initial_request",
            "span_002_scalability_analysis span_003_security_analysis"
            " span_004_data_architecture span_005_cost_analysis",
        ),
        (
            "span_002_scalability_analysis span_003_security_analysis"
            " span_004_data_architecture span_005_cost_analysis",
            "span_006_initial_synthesis",
        ),
        (
            "span_006_initial_synthesis",
            "span_007_scalability_refinement span_008_data_refinement span_009_cost_refinement",
        ),
        (
            "span_007_scalability_refinement span_008_data_refinement span_009_cost_refinement",
            "span_010_refined_synthesis",
        ),
        ("span_010_refined_synthesis", "span_011_user_question"),
        ("span_011_user_question", "span_012_ha_analysis span_013_dr_analysis"),
        ("span_012_ha_analysis span_013_dr_analysis", "span_014_ha_dr_synthesis"),
        ("span_014_ha_dr_synthesis", "span_015_final_summary"),
    ),
}

if __name__ == "__main__":  # What `saga aeg eval --edges FILE` reads.
    print(json.dumps({name: sorted(edges) for name, edges in TRUE_EDGES.items()}, indent=1))
