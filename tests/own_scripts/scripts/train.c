/* A C program in the manner of llm.c: options of one letter, the loss of a validation on a line of its own. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void usage(void) {
    fprintf(stderr, "Usage: ./train [options]\n");
    fprintf(stderr, "  -l <float>  learning rate (default = 2e-2f)\n");
    fprintf(stderr, "  -b <int>    batch size B (default = 8)\n");
    fprintf(stderr, "  -v <int>    val_loss_every, how often the val loss is told (default = 10)\n");
    exit(EXIT_FAILURE);
}

int main(int argc, char **argv) {
    double rate = 2e-2, slope = 0.0;
    int batch = 8, every = 10, step, i;
    for (i = 1; i < argc; i += 2) {
        if (i + 1 >= argc || argv[i][0] != '-' || strlen(argv[i]) != 2) usage();
        else if (argv[i][1] == 'l') rate = atof(argv[i + 1]);
        else if (argv[i][1] == 'b') batch = atoi(argv[i + 1]);
        else if (argv[i][1] == 'v') every = atoi(argv[i + 1]);
        else usage();
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (step = 0; step <= 60; step++) {
        usleep(30000); /* a training takes time */
        if (step % every == 0) printf("val loss %f\n", 0.1 + (slope - 3) * (slope - 3) / 3);
        double sum = 0, loss = 0;
        for (i = 0; i < batch; i++) {
            double x = (double)rand() / RAND_MAX * 2 - 1, error = slope * x - 3 * x;
            sum += error * x / batch;
            loss += error * error / batch;
        }
        slope -= 10 * rate * sum;
        if (step < 60) printf("step %4d/60 | loss %f (+nanz)| norm 1.0000 | lr %.2e | 3.21 ms\n", step + 1, loss, rate);
    }
    return 0;
}
