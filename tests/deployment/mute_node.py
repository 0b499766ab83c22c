"""A node whose first reply of a round is announced to its SuperNode, and never sent; then it is
well."""

import sys

import httpx

from hushrec.cli import main
from hushrec.deployment.flower import transport as flower
from hushrec.deployment.node.worker import Worker
from hushrec.io.codec import kind_of

if __name__ == "__main__":
    asked, plain_answer, plain_push = [], Worker.answer, flower.push_message

    def answer(self, message):
        if kind_of(message) in ("train", "stage"):
            asked.append(True)
        return plain_answer(self, message)

    def push(client, reply, context):
        if len(asked) == 1:
            asked.append(True)

            def fail(request):
                raise httpx.ReadError("cut")

            client.PushObject = fail
        plain_push(client, reply, context)

    Worker.answer, flower.push_message = answer, push
    main(["federate", "node", sys.argv[1]])
